"""The hidden state of every token comes exactly once, in order, however the work is divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from setpoint.core.control import PauseMode
from setpoint_testing.harness import VOCAB, Harness
from setpoint_testing.recordings import record, replayed
from setpoint_testing.scripted import hashed_token, reference

LONG = [token % VOCAB for token in range(3, 40)]


def check(h: Harness, rid: str, prompt: list[int], num_new: int) -> None:
    ids = reference(np.array(prompt, np.int32), num_new, hashed_token(VOCAB))
    assert h.outcomes[rid].ids == ids
    pairs = list(enumerate([*prompt, *ids][:-1]))
    assert h.outcomes[rid].hidden_states == [float(number) for pair in pairs for number in pair]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"chunked_prefill_size": 8},
        {"chunked_prefill_size": 8, "mixed_chunk": True},
        {"page_size": 4},
    ],
    ids=str,
)
def test_every_position_once(config: dict[str, Any], depth: int, tmp_path: Path) -> None:
    h = Harness(depth=depth, num_pages=200, **config)
    h.submit("before", LONG, max_new_tokens=3)
    h.drain()
    for number in range(3):
        h.submit(f"r{number}", LONG, max_new_tokens=4 + number, hidden_states=True)
    h.submit("plain", LONG, max_new_tokens=6)
    h.submit("held", LONG[:9], max_new_tokens=70, hidden_states=True, stream=False)
    h.drain()
    for number in range(3):
        check(h, f"r{number}", LONG, 4 + number)
    check(h, "held", LONG[:9], 70)
    assert h.outcomes["plain"].hidden_states == []
    assert h.outcomes["plain"].num_cached > 0
    assert h.outcomes["r0"].num_cached == 0
    outcome = replayed(record(h, tmp_path / "run"))
    assert outcome.agrees, outcome.difference


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_retracted_request_brings_none_twice(depth: int) -> None:
    h = Harness(num_pages=70, depth=depth, conservativeness=0.01, chunked_prefill_size=16)
    for number in range(4):
        h.submit(f"r{number}", [*LONG[:6], number], max_new_tokens=25, hidden_states=True)
        h.turn()
    h.drain()
    assert h.recorder.retractions
    for number in range(4):
        check(h, f"r{number}", [*LONG[:6], number], 25)


def test_a_pause_in_the_middle_of_a_prompt() -> None:
    h = Harness(num_pages=200, depth=1, chunked_prefill_size=8)
    h.submit("a", LONG, max_new_tokens=5, hidden_states=True)
    h.turn(3)
    h.pause(PauseMode.RETRACT)
    h.turn()
    h.resume()
    h.drain()
    check(h, "a", LONG, 5)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("stream", [True, False])
def test_that_of_each_output_token(depth: int, stream: bool, tmp_path: Path) -> None:
    """Nothing of the prompt is brought, so that its beginning may come from the cache."""
    h = Harness(depth=depth, num_pages=70, conservativeness=0.01, chunked_prefill_size=8)
    h.submit("before", LONG, max_new_tokens=3)
    h.drain()
    for number in range(4):
        h.submit(
            f"r{number}", LONG, max_new_tokens=20 + number, output_hidden_states=True, stream=stream
        )
    h.drain()
    assert h.recorder.retractions
    for number in range(4):
        ids = reference(np.array(LONG, np.int32), 20 + number, hashed_token(VOCAB))
        outcome = h.outcomes[f"r{number}"]
        assert (outcome.ids, outcome.num_cached > 0) == (ids, True)
        pairs = list(enumerate([*LONG, *ids][:-1]))[len(LONG) - 1 :]
        assert outcome.hidden_states == [float(n) for pair in pairs for n in pair]
    replay = replayed(record(h, tmp_path / "run"))
    assert replay.agrees, replay.difference
