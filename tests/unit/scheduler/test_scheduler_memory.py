"""Memory that is given back, and other weights: allowed when no request is in the way; requests
wait and are served after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from setpoint.core.control import OperationDone, PauseMode, Refused
from setpoint.core.errors import OutOfMemoryError
from setpoint.core.operations import (
    LoadWeights,
    MemoryPart,
    ReleaseMemory,
    RestoreMemory,
)
from setpoint.core.records import Continued, Operated
from setpoint.recording.format import OFF, ON
from setpoint.recording.frames import FrameReader
from setpoint_testing.harness import VOCAB, Harness
from setpoint_testing.operators import ScriptedOperator
from setpoint_testing.recordings import record, replayed
from setpoint_testing.scripted import hashed_token, reference

PROMPT = [10, 11, 12]
ALL = list(MemoryPart)
KV, WEIGHTS, GRAPH = MemoryPart.KV_CACHE, MemoryPart.WEIGHTS, MemoryPart.CUDA_GRAPH


def expected(num_new: int) -> list[int]:
    return reference(np.array(PROMPT, np.int32), num_new, hashed_token(VOCAB))


def started(**config: Any) -> tuple[Harness, ScriptedOperator]:
    """One request in decode, one in the queue."""
    operator = ScriptedOperator()
    h = Harness(operator=operator, max_running_requests=1, **config)
    h.submit("running", PROMPT, max_new_tokens=12)
    h.submit("queued", PROMPT, max_new_tokens=3)
    h.turn(3)
    return h, operator


def refused(h: Harness, words: str) -> None:
    h.turn()
    answer = h.replies[-1].answer
    assert isinstance(answer, Refused)
    assert words in answer.error


def done(h: Harness) -> None:
    h.turn()
    assert isinstance(h.replies[-1].answer, OperationDone), h.replies[-1].answer


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_busy_engine_refuses_every_operation(depth: int) -> None:
    h, operator = started(depth=depth)
    for operation in (
        ReleaseMemory(ALL),
        RestoreMemory([KV]),
        LoadWeights("w", "auto", flush_cache=True),
    ):
        h.operate(operation)
        refused(h, "An engine is not idle: 2 requests are open. Pause first")
    h.drain()
    assert not operator.done
    assert h.outcomes["running"].ids == expected(12)


@pytest.mark.parametrize("depth", [0, 1])
def test_released_memory_stops_the_engine_until_all_is_back(depth: int, tmp_path: Path) -> None:
    h, _ = started(depth=depth)
    h.pause(PauseMode.RETRACT)
    h.turn()
    h.operate(ReleaseMemory([KV, WEIGHTS]))
    done(h)
    stats = h.cache.pool_stats()
    assert stats.free == stats.total, "what the cache held is gone"
    h.operate(ReleaseMemory([WEIGHTS]))
    refused(h, "tags must not name memory that is already released: weights.")
    h.resume()
    num_plans = len(h.plans)
    h.submit("late", PROMPT, max_new_tokens=2)
    h.turn(10)
    assert len(h.plans) == num_plans
    assert h.scheduler.state.num_paused == 3
    h.operate(RestoreMemory([WEIGHTS]))
    done(h)
    h.turn(5)
    assert len(h.plans) == num_plans
    h.operate(RestoreMemory([WEIGHTS]))
    refused(h, "tags must not name memory that is not released: weights.")
    h.operate(RestoreMemory([KV]))
    done(h)
    h.drain()
    assert h.outcomes["running"].ids == expected(12)
    assert h.outcomes["late"].ids == expected(2)
    assert len(h.recorder.of(Continued)) == 1
    for content in (OFF, ON):
        outcome = replayed(record(h, tmp_path / content, content=content))
        assert outcome.agrees, outcome.difference
        assert outcome.num_steps == len(h.plans)


def test_memory_that_paused_requests_keep_is_not_released() -> None:
    h, operator = started()
    h.pause(PauseMode.IN_PLACE)
    h.turn()
    h.operate(ReleaseMemory(ALL))
    refused(h, "1 paused request keeps memory in the KV cache. Pause again with")
    h.operate(LoadWeights("w", "auto", flush_cache=True))
    refused(h, "1 paused request keeps memory in the KV cache. Pause again with")
    assert not operator.done
    h.operate(ReleaseMemory([WEIGHTS, GRAPH]))
    done(h)
    h.operate(LoadWeights("w", "auto", flush_cache=False))
    done(h)
    assert h.scheduler.state.released == {GRAPH}
    h.operate(RestoreMemory([GRAPH]))
    done(h)
    h.resume()
    h.drain()
    assert h.outcomes["running"].ids == expected(12)
    assert h.outcomes["running"].num_retractions == 0


@pytest.mark.parametrize("flush", [True, False])
def test_new_weights_empty_the_prefix_cache(flush: bool) -> None:
    h, operator = started()
    h.drain()
    held = h.cache.pool_stats().evictable
    assert held > 0
    operator.error_of = lambda call_id, operation: OutOfMemoryError("no room")
    h.operate(LoadWeights("w", "auto", flush_cache=flush))
    refused(h, "no room")
    assert h.cache.pool_stats().evictable == held, "nothing has changed"
    operator.error_of = lambda call_id, operation: None
    h.operate(LoadWeights("w", "auto", flush_cache=flush))
    done(h)
    assert h.cache.pool_stats().evictable == (0 if flush else held)


@pytest.mark.parametrize("content", [OFF, ON])
def test_a_failure_is_replayed(content: str, tmp_path: Path) -> None:
    h, operator = started()
    h.pause(PauseMode.RETRACT)
    operator.error_of = lambda call_id, operation: OutOfMemoryError("SECRET/path has no weights")
    h.operate(ReleaseMemory(ALL))
    h.operate(LoadWeights("SECRET/path", "auto", flush_cache=True))
    h.turn()
    operator.error_of = lambda call_id, operation: None
    h.operate(LoadWeights("SECRET/path", "auto", flush_cache=True))
    h.resume()
    h.drain()
    path = record(h, tmp_path / "run", content=content)
    outcome = replayed(path)
    assert outcome.agrees, outcome.difference
    assert [bool(each.error) for each in h.recorder.of(Operated)] == [True, True, False]
    written = b"".join(FrameReader(path.read_bytes()))
    assert (b"SECRET" in written) == (content == ON)


def test_a_standstill_does_not_count_towards_time_limits() -> None:
    h, _ = started(waiting_timeout_s=5.0)
    h.drain()
    h.operate(ReleaseMemory(ALL))
    h.turn()
    h.submit("late", PROMPT, max_new_tokens=2)
    h.turn()
    h.clock.advance(60.0)
    h.operate(RestoreMemory(ALL))
    h.drain()
    assert h.outcomes["late"].ids == expected(2)
