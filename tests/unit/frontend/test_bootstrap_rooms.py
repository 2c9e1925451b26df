"""The room in which a prefill and a decode server compute a request, from the body and from
headers."""

from __future__ import annotations

from typing import Any

import pytest

from setpoint.core.bootstrap import Bootstrap
from setpoint.core.errors import RequestError
from setpoint.core.request import Request, pack_ids
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.arrival import ARRIVAL, Arrival
from setpoint.frontend.bootstrap_rooms import Sharing, with_bootstrap_rooms

DECODE = Sharing("decode", port=8998)
HOST = {"bootstrap_host": "p"}
LAST = (1 << 63) - 1


class Known:
    """Knows one prefill server."""

    def known(self, host: str, port: int) -> tuple[str, int]:
        if (host, port) != ("p", 8998):
            raise RequestError("unknown")
        return "10.0.0.1", 8998


def rooms(
    count: int,
    received: dict[str, Any],
    sharing: Sharing = DECODE,
    servers: Known | None = None,
) -> list[Any]:
    requests = [
        Request(rid=f"r{index}", prompt_ids=pack_ids([1]), sampling=SamplingParams(), seed=0)
        for index in range(count)
    ]
    return [
        each.options.bootstrap
        for each in with_bootstrap_rooms(requests, received, sharing, servers)
    ]


def test_each_request_has_a_room_of_its_own() -> None:
    assert rooms(1, {**HOST, "bootstrap_room": 7}) == [Bootstrap(7, "p", 8998)]
    found = rooms(3, {**HOST, "bootstrap_port": 9, "bootstrap_room": LAST})
    assert [each.room for each in found] == [LAST, 0, 1]
    assert {each.port for each in found} == {9}
    of_two_prompts = rooms(4, {"bootstrap_host": ["p", "q"], "bootstrap_room": [10, 20]})
    assert [(each.room, each.host) for each in of_two_prompts] == [
        (10, "p"),
        (11, "p"),
        (20, "q"),
        (21, "q"),
    ]


@pytest.mark.parametrize(
    ("received", "words"),
    [
        ({}, "bootstrap_room is missing. .* send the request to the router in front of it"),
        ({"bootstrap_room": 1}, "bootstrap_host is missing.* Send the request to the router"),
        ({**HOST, "bootstrap_room": -1}, "bootstrap_room must be a number"),
        ({**HOST, "bootstrap_room": True}, "bootstrap_room must be a number"),
        ({**HOST, "bootstrap_room": LAST + 1}, "bootstrap_room must be a number"),
        ({**HOST, "bootstrap_room": [1, 2, 3]}, "one value for each prompt, not 3"),
        ({**HOST, "bootstrap_room": []}, "one value for each prompt, not 0"),
        ({**HOST, "bootstrap_room": 1, "bootstrap_port": 0}, "bootstrap_port must be"),
        ({"bootstrap_host": "h" * 300, "bootstrap_room": 1}, "bootstrap_host must be"),
        ({**HOST, "bootstrap_room": 1, "disagg_prefill_dp_rank": -2}, "must be a rank"),
    ],
)
def test_what_cannot_be_a_room_is_refused(received: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        rooms(2, received)


@pytest.mark.parametrize(
    "host", ["", "[]", "2.2.2.2 ", " p", "a b", "p\r\nX: y", "p\0", "p\n", "http://p", "a@p", "pé"]
)
def test_hosts_that_no_server_can_have_are_refused(host: str) -> None:
    with pytest.raises(RequestError, match="bootstrap_host must be the name or address"):
        rooms(1, {"bootstrap_host": host, "bootstrap_room": 1})


@pytest.mark.parametrize("host", ["p", "p-1.rack_2.example", "10.0.0.1", "::1", "fe80::1%eth0"])
def test_hosts_are_names_and_addresses(host: str) -> None:
    assert rooms(1, {"bootstrap_host": host, "bootstrap_room": 1})[0].host == host


def test_an_address_in_brackets_is_the_same_host() -> None:
    assert rooms(1, {"bootstrap_host": "[::1]", "bootstrap_room": 1})[0].host == "::1"


def test_a_prefill_server_needs_no_host_and_a_whole_server_no_room() -> None:
    assert rooms(1, {"bootstrap_room": 3}, Sharing("prefill")) == [Bootstrap(3, "", 8998)]
    assert rooms(1, {"bootstrap_room": 3}, Sharing()) == [None]
    with pytest.raises(RequestError, match="bootstrap_host is not supported by a server without"):
        rooms(1, HOST, Sharing())


def test_a_refusal_says_where_the_request_belongs() -> None:
    """Red before: a decode server that chooses by itself asked for a field that it needs not."""
    alone = Sharing("decode", finds_pairs=True)
    for received, sharing, words in (
        ({}, Sharing("prefill"), "to the router, which adds the room, or to the decode server"),
        ({"bootstrap_room": 1}, alone, "Leave bootstrap_room out: this server chooses a prefill"),
        (HOST, alone, "Leave them all out: this server chooses a prefill server itself"),
    ):
        with pytest.raises(RequestError, match=words):
            rooms(1, received, sharing)


def test_headers_replace_fields_where_that_is_allowed() -> None:
    headers = {"x-override-bootstrap-room": "5", "x-override-bootstrap-host": "other"}
    received = {**HOST, "bootstrap_room": 4}
    token = ARRIVAL.set(Arrival(headers=headers))
    try:
        allowed = Sharing("decode", header_overrides=True)
        assert rooms(1, received, allowed) == [Bootstrap(5, "other", 8998)]
        assert rooms(1, received) == [Bootstrap(4, "p", 8998)]
        headers["x-override-bootstrap-room"] = "five"
        with pytest.raises(RequestError, match="must be a number"):
            rooms(1, received, allowed)
    finally:
        ARRIVAL.reset(token)


def test_a_request_names_only_prefill_servers_that_are_known() -> None:
    """Red before: whatever it named was asked for keys and values."""
    known = Known()
    assert rooms(1, {**HOST, "bootstrap_room": 7}, servers=known) == [
        Bootstrap(7, "10.0.0.1", 8998)
    ]
    fake = {"bootstrap_host": "2.2.2.2", "bootstrap_room": 7}
    assert rooms(1, fake, servers=known)[0].is_fake
    for named in (
        {"bootstrap_host": "q"},
        {"bootstrap_host": ["p", "q"], "bootstrap_room": [7, 8]},
        {**HOST, "bootstrap_port": 9},
    ):
        with pytest.raises(RequestError, match="unknown"):
            rooms(2, {"bootstrap_room": 7, **named}, servers=known)


@pytest.mark.parametrize(
    "received", [HOST, {"bootstrap_port": 9}, {"disagg_prefill_dp_rank": 0}, {**HOST, "x": 1}]
)
def test_a_server_that_chooses_itself_is_told_nothing_by_halves(received: dict[str, Any]) -> None:
    """Red before: a server without a room was ignored."""
    sharing = Sharing("decode", finds_pairs=True)
    assert rooms(1, {"bootstrap_host": None}, sharing) == [None]
    with pytest.raises(RequestError, match="although another field or header names"):
        rooms(1, received, sharing)
