"""Reads in which bootstrap room a prefill and a decode server compute a client's requests together,
from the body or from headers that override it (docs/disaggregation.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from setpoint.core.bootstrap import FAKE_HOST, Bootstrap
from setpoint.core.bounds import INT64_MAX
from setpoint.core.conversion import as_whole
from setpoint.core.errors import RequestError
from setpoint.core.excerpt import excerpt
from setpoint.core.handover import Role
from setpoint.core.request import Request
from setpoint.frontend.arrival import arrival
from setpoint.frontend.pairing import KnownServers

HOST, PORT, ROOM = "bootstrap_host", "bootstrap_port", "bootstrap_room"
PREFILL_RANK = "disagg_prefill_dp_rank"
FIELDS = (HOST, PORT, ROOM, PREFILL_RANK)
OVERRIDE = "x-override-"
HOST_NAME = re.compile(r"\[?[A-Za-z0-9._:%-]{1,255}\]?")
"""Names and addresses, of which those with colons may have brackets."""
MAX_DIGITS = 20
"""Most digits of a number in a header."""
NO_ROOM = {
    "prefill": f"{ROOM} is missing. This server computes only the prompt of each request: send the"
    " request to the router, which adds the room, or to the decode server.",
    "decode": f"{ROOM} is missing. This server computes only a part of each request: send the"
    " request to the router in front of it, which adds the room.",
}
HALF_A_ROOM = (
    f"{ROOM} is missing, although another field or header names a prefill server. Leave them all"
    " out: this server chooses a prefill server itself."
)
NO_HOST = (
    f"{HOST} is missing: it names the prefill server of the request. Send the request to the router"
    " in front of this server, which adds it."
)
NO_HOST_NEEDED = (
    f"{HOST} is missing. Leave {ROOM} out: this server chooses a prefill server itself. (A router"
    f" sends {HOST} as well.)"
)


@dataclass(slots=True, frozen=True)
class Sharing:
    """How a server reads the bootstrap rooms of its requests."""

    role: Role = "null"
    port: int = 8998
    """The bootstrap port of requests that name none."""
    header_overrides: bool = False
    finds_pairs: bool = False
    """Whether this decode server finds prefill servers by itself, so that requests need no room."""


def with_bootstrap_rooms(
    requests: Sequence[Request],
    received: Mapping[str, Any],
    sharing: Sharing,
    servers: KnownServers | None,
) -> Sequence[Request]:
    """The requests of one body with their bootstrap rooms: each prompt has its own, and each
    further sample of a prompt the next number. servers: those that a decode server knows. Raises
    RequestError for one that is missing or wrong."""
    if sharing.role == "null":
        for name in (HOST, PORT, PREFILL_RANK):
            if received.get(name) not in (None, []):
                raise RequestError(
                    f"{name} is not supported by a server without --disaggregation-mode."
                )
        return requests
    given = {name: _overridden(name, received, sharing) for name in FIELDS}
    if sharing.finds_pairs and not names_bootstrap_room(received, sharing):
        return requests
    if given[ROOM] is None:
        raise RequestError(HALF_A_ROOM if sharing.finds_pairs else NO_ROOM[sharing.role])
    count = len(requests)
    rooms = _for_each(given[ROOM], count, ROOM, counts_up=True)
    hosts = _for_each(given[HOST], count, HOST)
    ports = _for_each(given[PORT], count, PORT)
    return [
        _in_room(request, _bootstrap(host, port, room, given[PREFILL_RANK], sharing, servers))
        for request, host, port, room in zip(requests, hosts, ports, rooms, strict=True)
    ]


def names_bootstrap_room(received: Mapping[str, Any], sharing: Sharing) -> bool:
    """Whether a body, or a header of it, names a bootstrap room or a prefill server."""
    return any(_overridden(name, received, sharing) not in (None, []) for name in FIELDS)


def rooms_of(requests: Sequence[Request]) -> list[int] | None:
    """The bootstrap rooms of requests that have some."""
    found = [each.options.bootstrap for each in requests]
    return [each.room for each in found if each is not None] if all(found) else None


def _overridden(name: str, received: Mapping[str, Any], sharing: Sharing) -> Any:
    header = OVERRIDE + name.replace("_", "-")
    text = arrival().headers.get(header) if sharing.header_overrides else None
    if text is None:
        given = received.get(name)
        return list(map(as_whole, given)) if isinstance(given, list) else as_whole(given)
    if name == HOST:
        return text
    if not text.isdecimal() or len(text) > MAX_DIGITS:
        raise RequestError(f"The header {header} must be a number, not {excerpt(text)}.")
    return int(text)


def _for_each(given: Any, count: int, name: str, *, counts_up: bool = False) -> list[Any]:
    """The value of each request. A list has one value for each prompt. counts_up: where several
    requests would share a number, each gets the next one."""
    values = given if isinstance(given, list) else [given]
    if not values or count % len(values):
        raise RequestError(f"{name} must have one value for each prompt, not {len(values)}.")
    samples = count // len(values)
    if not counts_up:
        return [value for value in values for _ in range(samples)]
    if not all(_is_int(value, 0, INT64_MAX) for value in values):
        raise RequestError(
            f"{name} must be a number from 0 to {INT64_MAX}, not {excerpt(str(given))}."
        )
    return [(value + index) & INT64_MAX for value in values for index in range(samples)]


def _bootstrap(
    host: Any, port: Any, room: int, rank: Any, sharing: Sharing, servers: KnownServers | None
) -> Bootstrap:
    if host is None and sharing.role == "decode":
        raise RequestError(NO_HOST_NEEDED if sharing.finds_pairs else NO_HOST)
    if host is not None and not (isinstance(host, str) and HOST_NAME.fullmatch(host)):
        raise RequestError(f"{HOST} must be the name or address of a prefill server.")
    if port is not None and not _is_int(port, 1, 65535):
        raise RequestError(f"{PORT} must be a number from 1 to 65535, not {excerpt(str(port))}.")
    if rank is not None and not _is_int(rank, 0, 1 << 16):
        raise RequestError(f"{PREFILL_RANK} must be a rank, not {excerpt(str(rank))}.")
    host, port = (host or "").strip("[]"), sharing.port if port is None else port
    if servers is not None and host != FAKE_HOST:
        host, port = servers.known(host, port)
    return Bootstrap(room, host, port, rank)


def _is_int(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _in_room(request: Request, bootstrap: Bootstrap) -> Request:
    options = msgspec.structs.replace(request.options, bootstrap=bootstrap)
    return msgspec.structs.replace(request, options=options)
