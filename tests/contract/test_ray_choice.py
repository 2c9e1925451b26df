"""The choice of a replica: by what its cache holds, by what it has to do, and by what was sent to it
a moment ago."""

from __future__ import annotations

from rayserve.choice import FRESH_S, Choice
from rayserve.prompts import Prompt
from setpoint.core.prefix_digest import grown, names_of
from setpoint.core.request import pack_ids


def prompt(first: int, num_tokens: int = 256) -> Prompt:
    return pack_ids(list(range(first, first + num_tokens))), ""


def hashes(*prompts: Prompt) -> bytes:
    return b"".join(name for ids, space in prompts for name in names_of(grown(b"", ids, space)))


def test_a_prompt_goes_where_it_is_cached() -> None:
    choice = Choice()
    choice.know({"a": hashes(prompt(1000)), "b": hashes(prompt(5000))})
    assert choice.order([prompt(1000)]) == ["a", "b"]
    assert choice.order([prompt(5000)]) == ["b", "a"]
    assert choice.order([(prompt(1000)[0], "another namespace")])[0] in ("a", "b")
    choice.know({"a": hashes(prompt(5000)), "b": b""})  # both caches have changed
    assert choice.order([prompt(5000)]) == ["a", "b"]


def test_load_outweighs_the_cache_in_the_end() -> None:
    """256 cached tokens are worth four open requests."""
    choice = Choice()
    choice.know({"a": hashes(prompt(1000)), "b": b""})
    for number in range(4):
        assert choice.order([prompt(1000)])[0] == "a"
        choice.sent(str(number), "a", [prompt(9000 + 300 * number)])
    choice.sent("4", "a", [prompt(20_000)])
    assert choice.order([prompt(1000)])[0] == "b"
    choice.done("4")
    choice.done("3")
    assert choice.order([prompt(1000)])[0] == "a"


def test_a_burst_of_one_prompt_stays_together() -> None:
    """What open requests will have cached counts before a replica reports it."""
    choice = Choice()
    choice.know({"a": b"", "b": b""})
    first = choice.order([prompt(1000)])[0]
    choice.sent("0", first, [prompt(1000)])
    assert choice.order([prompt(1000)])[0] == first
    assert choice.order([prompt(5000)])[0] != first


def test_what_a_request_left_counts_until_reports_have_it() -> None:
    now = 0.0
    choice = Choice(lambda: now)
    choice.know({"a": b"", "b": b""})
    choice.sent("0", "b", [prompt(1000)])
    choice.done("0")
    assert choice.order([prompt(1000)])[0] == "b"
    choice.know({"a": b"", "b": hashes(prompt(7000))})  # older than the request
    assert choice.order([prompt(1000)])[0] == "b"
    now = 2 * FRESH_S
    choice.know({"a": b"", "b": hashes(prompt(7000), prompt(9000))})  # it was evicted
    assert choice.order([prompt(1000)])[0] == "a"
    choice.sent("1", "b", [prompt(3000)])
    choice.cancelled("1")
    assert choice.order([prompt(3000)])[0] == "a"


def test_requests_are_counted_once_and_forgotten_with_their_replica() -> None:
    choice = Choice()
    choice.know({"a": b"", "b": b""})
    choice.sent("0", "a", [prompt(1), prompt(2)])
    choice.sent("0", "b", [prompt(1), prompt(2)])  # Ray gave it to the other one
    assert (choice.num_open("a"), choice.num_open("b")) == (0, 2)
    choice.know({"a": b""})
    choice.done("0")
    choice.done("0")
    choice.sent("1", "b", [prompt(1)])  # gone meanwhile
    choice.know({"a": b"", "b": b""})
    assert (choice.num_open("a"), choice.num_open("b")) == (0, 0)


def test_calls_without_a_prompt_go_to_the_less_busy_one() -> None:
    choice = Choice()
    choice.know({"a": b"", "b": b""})
    choice.sent("0", "a", [prompt(1)])
    assert choice.order([]) == ["b", "a"]
    assert Choice().order([prompt(1)]) == []
