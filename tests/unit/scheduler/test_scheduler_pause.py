"""Pause and continue: in every state that a request can be in, with steps in flight or without, no
token is lost or changed, and nothing is planned in between."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from setpoint.core.control import (
    CacheFlush,
    Continue,
    FlushCache,
    Hold,
    Operate,
    Pause,
    PauseDone,
    PauseMode,
)
from setpoint.core.messages import Reply, ToLoop
from setpoint.core.operations import MemoryPart, ReleaseMemory, RestoreMemory
from setpoint.core.records import Continued, Paused, RequestAdmitted, StepPlanned, Turn
from setpoint.observe.figures import Figures
from setpoint.observe.logline import LogLines
from setpoint.recording.format import OFF, ON
from setpoint_testing.harness import VOCAB, Harness
from setpoint_testing.operators import ScriptedOperator
from setpoint_testing.preparers import AnyToken, ScriptedPreparer
from setpoint_testing.recordings import record, replayed
from setpoint_testing.scripted import hashed_token, reference

PROMPT = [10, 11, 12]
LONG = list(range(1, 31))
MODES = pytest.mark.parametrize("mode", PauseMode)
DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])


def expected(num_new: int, prompt: list[int] = PROMPT) -> list[int]:
    return reference(np.array(prompt, np.int32), num_new, hashed_token(VOCAB))


def everywhere(depth: int, **config: Any) -> Harness:
    """Requests in decode, in the middle of a prompt, in the queue, and in preparation."""
    preparer = ScriptedPreparer(
        lambda request: AnyToken(), needs=lambda request: request.rid == "prepared", hold=True
    )
    h = Harness(
        depth=depth, max_running_requests=2, chunked_prefill_size=8, preparer=preparer, **config
    )
    h.submit("decoding", PROMPT, max_new_tokens=20)
    h.turn(4)
    h.submit("chunked", LONG, max_new_tokens=5)
    h.submit("queued", PROMPT, max_new_tokens=6)
    h.submit("prepared", PROMPT, max_new_tokens=7)
    h.turn(2)
    state = h.scheduler.state
    assert state.chunking is h.sequence("chunked")
    assert h.waiting() == ["queued"]
    assert len(state.preparing) == 1
    return h


def check_all(h: Harness) -> None:
    assert h.outcomes["decoding"].ids == expected(20)
    assert h.outcomes["chunked"].ids == expected(5, LONG)
    assert h.outcomes["queued"].ids == expected(6)
    assert h.outcomes["prepared"].ids == expected(7)


@MODES
@DEPTHS
def test_no_mode_changes_a_token(mode: PauseMode, depth: int, tmp_path: Path) -> None:
    h = everywhere(depth)
    h.pause(mode)
    h.turn()
    state, (reply,) = h.scheduler.state, h.replies
    assert not state.inflight
    assert isinstance(reply.answer, PauseDone)
    if mode is PauseMode.ABORT:
        ends = [outcome.finish for outcome in h.outcomes.values()]
        assert {end.type for end in ends if end is not None} == {"abort"}
        assert None not in ends
        assert reply.answer.num_paused_reqs == 0
        assert h.preparer.cancelled == [3]
    elif mode is PauseMode.RETRACT:
        assert h.waiting() == ["queued", "decoding", "chunked"]
        assert state.cache.pool_stats().held == state.cache.pool_stats().locked == 0
        assert reply.answer.num_paused_reqs == 4
    else:
        assert h.running() == ["decoding", "chunked"]
        assert reply.answer.num_paused_reqs == 4
    before = len(h.plans)
    sent = sum(len(outcome.ids) for outcome in h.outcomes.values())
    h.turn(5)
    h.submit("late", PROMPT, max_new_tokens=3)
    if 3 in h.preparer.open:
        h.preparer.finish(3)
    h.turn(20)
    assert len(h.plans) == before
    assert sum(len(outcome.ids) for outcome in h.outcomes.values()) == sent
    h.resume()
    h.drain()
    assert h.outcomes["late"].ids == expected(3)
    if mode is PauseMode.ABORT:
        assert h.outcomes["decoding"].ids == expected(20)[: len(h.outcomes["decoding"].ids)]
    else:
        check_all(h)
    for content in (OFF, ON):
        outcome = replayed(record(h, tmp_path / content, content=content))
        assert outcome.agrees, outcome.difference
        assert outcome.num_steps == len(h.plans)


@DEPTHS
def test_in_place_keeps_what_is_computed(depth: int) -> None:
    h = everywhere(depth)
    h.pause(PauseMode.IN_PLACE)
    h.turn(3)
    h.resume()
    h.preparer.finish(3)
    h.drain()
    check_all(h)
    admitted = h.recorder.of(RequestAdmitted)
    assert len(admitted) == len(h.outcomes)
    assert {outcome.num_retractions for outcome in h.outcomes.values()} == {0}


@MODES
def test_the_cache_can_be_flushed_where_nothing_runs(mode: PauseMode) -> None:
    h = everywhere(1)
    h.pause(mode)
    h.turn()
    h.wire.post(FlushCache(5))
    h.turn()
    reply = h.replies[-1]
    stats = h.cache.pool_stats()
    if mode is PauseMode.IN_PLACE:
        assert reply == Reply(5, CacheFlush(False, 0))
    else:
        assert reply.answer.is_flushed
        assert reply.answer.num_tokens > 0
        assert stats.free == stats.total
    h.resume()
    if 3 in h.preparer.open:
        h.preparer.finish(3)
    h.drain()
    if mode is not PauseMode.ABORT:
        check_all(h)


def test_a_pause_during_a_pause_changes_its_mode() -> None:
    h = everywhere(1)
    for mode in (PauseMode.IN_PLACE, PauseMode.RETRACT, PauseMode.IN_PLACE):
        h.pause(mode)
        h.turn()
    assert h.running() == []
    assert h.scheduler.state.pause is PauseMode.IN_PLACE
    h.pause(PauseMode.ABORT)
    h.turn()
    assert all(outcome.finish is not None for outcome in h.outcomes.values())
    h.resume()
    h.resume()  # the second does nothing
    h.drain()
    assert len(h.recorder.of(Continued)) == 1
    assert [each.mode for each in h.recorder.of(Paused)] == [
        PauseMode.IN_PLACE,
        PauseMode.RETRACT,
        PauseMode.IN_PLACE,
        PauseMode.ABORT,
    ]


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
def test_a_pause_does_not_count_towards_time_limits(mode: PauseMode) -> None:
    """Every kind of limit is shorter than the pause; after it each has its whole rest left."""
    h = everywhere(1, waiting_timeout_s=5.0, running_timeout_s=5.0, preparation_timeout_s=5.0)
    h.clock.advance(3.0)
    h.pause(mode)
    h.turn()
    h.clock.advance(60.0)
    h.submit("late", PROMPT, max_new_tokens=2)
    h.turn(3)
    h.resume()
    h.turn()
    assert not any(outcome.finish for outcome in h.outcomes.values())
    h.clock.advance(4.0)
    h.turn()
    ends = {rid: outcome.finish for rid, outcome in h.outcomes.items()}
    late = {rid for rid, end in ends.items() if end is not None and end.status_code == 503}
    assert "prepared" in late
    assert "late" not in late
    if mode is PauseMode.IN_PLACE:
        assert "queued" in late


def test_a_paused_engine_waits_for_messages_and_records_nothing() -> None:
    h = everywhere(1)
    h.pause(PauseMode.IN_PLACE)
    h.turn(2)
    turns = len(h.recorder.of(Turn))
    h.turn(50)
    assert len(h.recorder.of(Turn)) == turns
    assert h.loop._rest_s() == 1.0


@MODES
def test_the_client_may_leave_or_abort_during_a_pause(mode: PauseMode) -> None:
    h = everywhere(1)
    h.pause(mode)
    h.turn()
    for rid in ("decoding", "queued"):
        h.stop(rid)
    h.abort("chunked", "prepared")
    h.turn(2)
    assert h.scheduler.state.is_idle
    assert h.preparer.cancelled == [3]
    h.resume()
    h.drain()


def test_a_flood_during_a_pause_waits_and_is_served() -> None:
    h = Harness(max_running_requests=4, max_queued_requests=1000)
    h.wire.post(Pause(1, PauseMode.RETRACT))
    h.turn()
    for number in range(1001):
        h.submit(f"r{number}", PROMPT, max_new_tokens=1)
    h.turn(3)
    assert len(h.waiting()) == 1000
    assert h.outcomes["r1000"].finish is not None
    assert h.outcomes["r1000"].finish.status_code == 503
    assert not h.recorder.of(StepPlanned)
    h.resume()
    h.drain()
    assert all(h.outcomes[f"r{number}"].ids == expected(1) for number in range(1000))


def test_a_hold_for_an_order_is_logged_as_no_pause(caplog: pytest.LogCaptureFixture) -> None:
    """Red before: each order of several engines logged a pause that no operator had asked for."""
    h, lines = (
        Harness(operator=ScriptedOperator()),
        LogLines(Figures(decode_log_interval=1), device="cpu"),
    )

    def logged(*messages: ToLoop) -> list[tuple[str, str]]:
        caplog.clear()
        h.recorder.records.clear()
        for message in messages:
            h.wire.post(message)
            h.turn()
        for each in [*h.recorder.of(Paused), *h.recorder.of(Continued)]:
            lines.on(each)
        return [(each.levelname, each.getMessage()[:30]) for each in caplog.records]

    with caplog.at_level(logging.DEBUG):
        assert logged(Hold(1, flushes=True), Continue(2)) == [
            ("DEBUG", "Held for an order to all engin"),
            ("DEBUG", "Not held any more for an order"),
        ]
        released = Operate(4, ReleaseMemory([MemoryPart.KV_CACHE]))
        back = Operate(6, RestoreMemory([MemoryPart.KV_CACHE]))
        told = logged(Hold(3, flushes=True), released, Continue(5), back)
        assert told[1][1] == "Generation continued after 0.0", "it has stood still for longer"
        assert logged(Hold(7, flushes=False), Pause(8, PauseMode.ABORT), Continue(9))[1:] == [
            ("INFO", "Generation paused (abort). #ab"),
            ("INFO", "Generation continued after 0.0"),
        ]
