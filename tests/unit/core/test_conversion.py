"""Types that two threads convert to for the first time at once, in a child process, which what used
to go wrong ends; and whole numbers that are written as floats."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest

from setpoint.core.conversion import convert
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.bodies import InvalidBodyError, decode_object

RACE = """
import importlib, sys, threading
from setpoint.frontend.bodies import parse

def work():
    gate.wait()
    done.append({call})

sys.setswitchinterval(1e-6)
module = importlib.import_module("{module}")
for _ in range(20):
    module = importlib.reload(module)
    gate, done = threading.Barrier(2), []
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 2 and done[0] == done[1], done
"""
"""A module that is executed again has new classes, of which msgspec knows nothing."""
TAG = (
    '{"type": "structural_tag", "format": {"type": "tag", "begin": "<a>", "content":'
    ' {"type": "any_text"}, "end": "</a>"}}'
)
BODY = {
    "model": "m",
    "max_tokens": 1,
    "messages": [{"role": "user", "content": "x"}],
    "tools": [{"name": "f", "input_schema": {}}],
}


@pytest.mark.parametrize(
    ("module", "call"),
    [
        ("setpoint.frontend.apis.anthropic.messages_body", f"parse({BODY}, module.MessagesBody)"),
        ("setpoint.grammar.tags", f"module.parse_tag('''{TAG}''')"),
    ],
    ids=["a long and a short body", "two grammars"],
)
def test_two_threads_learn_a_type_at_once(module: str, call: str) -> None:
    script = RACE.format(module=module, call=call)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


class Inner(msgspec.Struct):
    count: int | None = None


class Outer(msgspec.Struct):
    count: int = 0
    share: float = 0.0
    either: int | str | None = None
    wide: float | int = 0.0
    ids: list[int] | None = None
    lists: list[list[int]] | None = None
    named: dict[str, int] | None = None
    inner: list[Inner] | None = None
    anything: Any = None
    free: dict[str, Any] | None = None


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"count": 5.0}, {"count": 5}),
        ({"count": 1e3}, {"count": 1000}),
        ({"either": -2.0}, {"either": -2}),
        ({"ids": [1.0, 2]}, {"ids": [1, 2]}),
        ({"lists": [[1.0], [2]]}, {"lists": [[1], [2]]}),
        ({"named": {"a": 7.0}}, {"named": {"a": 7}}),
        ({"inner": [{"count": 3.0}]}, {"inner": [Inner(3)]}),
        (
            {"count": 1.0, "share": 1.0, "wide": 2.0, "anything": 3.0, "free": {"a": [4.0]}},
            {"count": 1, "share": 1.0, "wide": 2.0, "anything": 3.0, "free": {"a": [4.0]}},
        ),
    ],
)
def test_whole_numbers_may_be_floats(given: dict[str, Any], found: dict[str, Any]) -> None:
    """Red before: "must be a whole number, got a number that is not whole"."""
    value = convert(given, Outer)
    assert value == Outer(**found)
    assert repr(value) == repr(Outer(**found)), "5 and 5.0 are equal"


@pytest.mark.parametrize("given", [{"count": 5.5}, {"count": "5"}, {"ids": [1.0, 1.5]}])
def test_what_is_no_whole_number_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        convert(given, Outer)
    with pytest.raises(msgspec.ValidationError):
        convert({"count": float("inf")}, Outer)


def test_sampling_parameters_may_be_floats() -> None:
    params = SamplingParams.parse(
        {"max_new_tokens": 5.0, "top_k": 2.0, "stop_token_ids": 3.0, "n": 1.0, "temperature": 1}
    )
    assert (params.max_new_tokens, params.top_k, params.stop_token_ids) == (5, 2, (3,))
    assert SamplingParams.parse({"stop_token_ids": [3.0]}).stop_token_ids == (3,)


@pytest.mark.parametrize("number", [b"1e999", b"-1e999", b"9" * 5000])
def test_a_number_out_of_range_is_called_that(number: bytes) -> None:
    """Red before: valid JSON was called invalid, and the place was no name of a field."""
    with pytest.raises(InvalidBodyError, match="The body has a number that is out of range"):
        decode_object(b'{"max_tokens": %s}' % number)
