"""What raises for one request ends that request with a 500; the others get their tokens, and every
page and slot is accounted for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from setpoint.core.messages import ToFrontend, Tokens
from setpoint.core.plan import Admit, StepPlan
from setpoint.core.records import RequestDone, SendFailed
from setpoint.core.request import Ids, Request
from setpoint_testing.harness import VOCAB, Harness
from setpoint_testing.preparers import ScriptedPreparer
from setpoint_testing.scripted import hashed_token, reference

POISON = 96
DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])
CHUNKS = pytest.mark.parametrize("chunk", [None, 3])
next_token = hashed_token(VOCAB - 1)  # never makes the poison itself


def prompts() -> dict[str, list[int]]:
    healthy = {f"r{number}": [7] * 4 + [number + 1] * (number + 2) for number in range(5)}
    return {**healthy, "bad": [7] * 4 + [POISON] * 3}


def run(harness: Harness, *, num_tokens: int = 9, message: str) -> None:
    """All requests twice over: the second time the prefixes are cached, those of the failed request
    too."""
    for turn in ("", "again-"):
        for rid, ids in prompts().items():
            harness.submit(turn + rid, ids, max_new_tokens=num_tokens)
            harness.turn()
        harness.drain()
        for rid, ids in prompts().items():
            outcome = harness.outcomes[turn + rid]
            assert outcome.finish is not None, rid
            if rid != "bad":
                assert outcome.finish.type == "length", (rid, outcome.finish)
                assert outcome.ids == reference(np.array(ids, np.int32), num_tokens, next_token), (
                    rid
                )
            else:
                assert (outcome.finish.type, outcome.finish.status_code) == ("abort", 500)
                assert outcome.finish.message is not None
                assert message in outcome.finish.message
    pool = harness.cache.pool_stats()
    assert pool.locked == pool.held == 0
    failed = [
        done.rid for done in harness.recorder.of(RequestDone) if done.finish.status_code == 500
    ]
    assert failed == ["bad", "again-bad"]


def is_bad(ids: Ids) -> bool:
    return bool((ids == POISON).any())


@DEPTHS
@CHUNKS
def test_an_admission_that_raises(
    depth: int, chunk: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    harness = Harness(
        depth=depth, chunked_prefill_size=chunk, next_token=next_token, strict_accounting=True
    )

    def look_at(admit: Admit) -> None:
        if is_bad(admit.ids):
            raise OverflowError("too large for a column")

    harness.executor.look_at = look_at
    run(harness, message="admission raised OverflowError")
    assert any(
        record.exc_info and "too large for a column" in str(record.exc_info[1])
        for record in caplog.records
    )


@DEPTHS
@CHUNKS
@pytest.mark.parametrize("outputs", [0, 4])
def test_sampling_that_raises(depth: int, chunk: int | None, outputs: int) -> None:
    def choose(history: Ids) -> int:
        if is_bad(history) and len(history) >= 7 + outputs:
            raise ValueError("cannot be sampled")
        return next_token(history)

    harness = Harness(
        depth=depth, chunked_prefill_size=chunk, next_token=choose, strict_accounting=True
    )
    run(harness, message="sampling raised ValueError")
    assert len(harness.outcomes["bad"].ids) <= outputs


class Automaton:
    """A grammar that allows everything, and raises where it is told to."""

    def __init__(self, raises: str) -> None:
        self._raises = raises
        self._num_accepted = 0

    def accept(self, token: int) -> None:
        self._num_accepted += 1
        if self._raises == "accept" and self._num_accepted > 2:
            raise RuntimeError("accept")

    def fill_mask(self, words: Ids) -> None:
        if self._raises == "fill_mask" and self._num_accepted > 2:
            raise RuntimeError("fill_mask")
        words[:] = -1

    @property
    def terminated(self) -> bool:
        if self._raises == "terminated" and self._num_accepted > 2:
            raise RuntimeError("terminated")
        return False


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("where", ["making", "accept", "fill_mask", "terminated"])
def test_a_grammar_that_raises(depth: int, where: str) -> None:
    def make(request: Request) -> Automaton:
        if where == "making":
            raise RuntimeError("making")
        return Automaton(where)

    preparer = ScriptedPreparer(make, needs=lambda request: is_bad(request.prompt()))
    harness = Harness(depth=depth, next_token=next_token, preparer=preparer, strict_accounting=True)
    run(harness, message="raised RuntimeError")


@DEPTHS
@pytest.mark.parametrize("at", [0, 3, 9])
def test_events_that_cannot_be_sent(depth: int, at: int) -> None:
    """Before the first token, in mid-stream, and with the end."""
    harness = Harness(depth=depth, next_token=next_token, strict_accounting=True)
    send: Callable[[ToFrontend], None] = harness.wire.send

    def checked(message: ToFrontend) -> None:
        for event in message.events if isinstance(message, Tokens) else ():
            if (
                harness._rids[event.seq_id].endswith("bad")
                and event.num_outputs >= at
                and event.ids
            ):
                raise OverflowError("an integer beyond 64 bits")
        send(message)

    harness.wire.send = checked  # type: ignore[method-assign]
    for rid, ids in prompts().items():
        harness.submit(rid, ids, max_new_tokens=9)
        harness.turn()
    harness.drain()
    for rid, ids in prompts().items():
        finish = harness.outcomes[rid].finish
        assert finish is not None
        if rid == "bad":
            assert finish.status_code == 500
        else:
            assert harness.outcomes[rid].ids == reference(np.array(ids, np.int32), 9, next_token)
    assert harness.cache.pool_stats().held == 0
    (done,) = [done for done in harness.recorder.of(RequestDone) if done.rid == "bad"]
    assert [lost.seq_id for lost in harness.recorder.of(SendFailed)] == [done.seq_id]
    assert done.finish.status_code == (None if at == 9 else 500)


def test_a_step_that_fails_as_a_whole_names_its_requests(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness(next_token=next_token)
    submit = harness.executor.submit

    def raising(plan: StepPlan) -> Any:
        if len(harness.plans) == 3:
            raise MemoryError("no room")
        return submit(plan)

    harness.executor.submit = raising
    for rid in ("one", "two\nforged"):
        harness.submit(rid, [1, 2, 3], max_new_tokens=20)
    with caplog.at_level(logging.ERROR), pytest.raises(MemoryError):
        harness.drain()
    (message,) = [
        record.getMessage() for record in caplog.records if "as a whole" in record.getMessage()
    ]
    assert message.endswith("one, two\\nforged")
