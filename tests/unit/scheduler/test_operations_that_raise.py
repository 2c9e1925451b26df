"""Whatever raises inside a control operation fails that operation alone: its client gets an error,
the engine goes on, and every request gets its tokens."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, get_args

import numpy as np
import pytest

from setpoint.core.control import (
    Call,
    Change,
    Continue,
    FlushCache,
    GetMoments,
    GetState,
    Hold,
    ListRequests,
    Operate,
    Pause,
    PauseMode,
    Refused,
)
from setpoint.core.messages import Abort, Reply, Stop
from setpoint.core.operations import (
    AttachStorage,
    ClearStorage,
    DetachStorage,
    FreezeGarbage,
    LoadWeights,
    MemoryPart,
    Operation,
    RecordExperts,
    ReleaseMemory,
    RestoreMemory,
    StartProfile,
    StopProfile,
)
from setpoint.core.settings import Settings
from setpoint_testing.harness import VOCAB, Harness
from setpoint_testing.operators import ScriptedOperator
from setpoint_testing.scripted import hashed_token, reference

KV = MemoryPart.KV_CACHE
ERRORS = (RecursionError, MemoryError, OSError, AssertionError, KeyError)
OPERATIONS: list[Operation] = [
    ReleaseMemory([KV]),
    RestoreMemory([KV]),
    LoadWeights("folder", "auto", flush_cache=True),
    StartProfile("path"),
    StopProfile(),
    RecordExperts("start"),
    FreezeGarbage(),
    AttachStorage("file", ""),
    DetachStorage(),
    ClearStorage(),
]
CONTROLS: dict[str, Callable[[int], Call]] = {
    "GetState": GetState,
    "GetMoments": GetMoments,
    "ListRequests": ListRequests,
    "FlushCache": FlushCache,
    "Change": lambda number: Change(number, Settings(max_running_requests=3), [], "test", ""),
    **{
        f"Pause {mode}": lambda number, mode=mode: Pause(number, mode)  # type: ignore[misc]
        for mode in PauseMode
    },
    "Hold": lambda number: Hold(number, flushes=True),
    "Continue": Continue,
    **{
        type(operation).__name__: lambda number, operation=operation: Operate(number, operation)  # type: ignore[misc]
        for operation in OPERATIONS
    },
}


def test_every_message_is_known_here() -> None:
    assert {type(make(0)) for make in CONTROLS.values()} == set(get_args(Call))
    assert {type(operation) for operation in OPERATIONS} == set(get_args(Operation))


@contextmanager
def raising_at(number: int, error: Exception, inside: str) -> Iterator[list[int]]:
    """Raise ``error`` in the ``number``-th call of a Python function under the function called
    ``inside``. Yields a list whose length is the number of such calls so far. The garbage
    collector waits: its callbacks are Python functions too, and run under whichever allocates."""
    calls: list[int] = []
    depth = 0

    def look(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal depth
        if frame.f_code.co_name == inside:
            depth += (event == "call") - (event == "return")
        elif depth and event == "call":
            calls.append(len(calls))
            if len(calls) == number:
                raise error

    gc.disable()
    sys.setprofile(look)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        gc.enable()


def prepared(name: str) -> Harness:
    """An engine in the state that the operation needs."""
    operator = ScriptedOperator()
    h = Harness(operator=operator, max_running_requests=3, num_slots=4)
    for number in range(4):
        h.submit(f"r{number}", [10 + number] * 5, max_new_tokens=8)
    h.turn(3)
    if name in ("Continue", "ReleaseMemory", "RestoreMemory", "LoadWeights", "FlushCache"):
        h.pause(PauseMode.RETRACT)
    if name == "RestoreMemory":
        h.operate(ReleaseMemory([KV]))
    h.turn(2)
    h.replies.clear()
    return h


def refusal(h: Harness, call_id: int) -> Refused:
    """The one answer of the last turn, which must refuse this call."""
    (reply,) = h.replies
    assert reply.id == call_id
    assert isinstance(reply.answer, Refused)
    return reply.answer


def finish(h: Harness) -> None:
    """Let everything go on, and serve one more request."""
    state = h.scheduler.state
    h.submit("later", [9] * 5, max_new_tokens=3)
    if state.released:
        h.operate(RestoreMemory(sorted(state.released)))
    h.resume()
    h.drain()
    assert h.outcomes["later"].ids == expected([9] * 5, 3)


def expected(prompt: list[int], num_new: int) -> list[int]:
    return reference(np.array(prompt, np.int32), num_new, hashed_token(VOCAB))


def check(h: Harness, *, aborted: bool) -> None:
    for number in range(4):
        outcome = h.outcomes[f"r{number}"]
        assert outcome.finish is not None
        if not (aborted and outcome.finish.type == "abort"):
            assert outcome.ids == expected([10 + number] * 5, 8)


@pytest.mark.parametrize("name", CONTROLS)
@pytest.mark.parametrize("error", ERRORS)
def test_an_operation_whose_first_call_raises(
    name: str, error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    """Red before: every one of these ended the engine."""
    h = prepared(name)
    h.wire.inbox.append(CONTROLS[name](7))
    with raising_at(1, error("injected"), "_answer"):
        h.turn()
    refused = refusal(h, 7)
    assert refused.status_code == 500
    assert f"raised {error.__name__}; the server's log has the details" in refused.error
    assert any(record.exc_info for record in caplog.records)
    finish(h)
    check(h, aborted=False)


@pytest.mark.parametrize("name", sorted({*CONTROLS} - {f"Pause {mode}" for mode in PauseMode}))
def test_an_operation_in_which_any_call_raises(name: str) -> None:
    """One run for each call of a function that the operation makes. A pause is not among them: a
    sequence that is half retracted cannot be told from a whole one."""
    number, num_calls = 0, 1
    while number < num_calls:
        number += 1
        h = prepared(name)
        h.wire.inbox.append(CONTROLS[name](7))
        with raising_at(number, RecursionError("injected"), "_answer") as calls:
            h.turn()
        num_calls = max(num_calls, len(calls))
        assert refusal(h, 7).error, number
        finish(h)
        check(h, aborted=False)
    assert num_calls > 0


def test_a_pause_that_raises_halfway_loses_no_end() -> None:
    """The requests that it had ended by then learn of it."""
    h = prepared("Pause abort")
    state, end, ended = h.scheduler.state, h.scheduler.state.end, []

    def ending(seq: Any, finish: Any, **options: Any) -> Any:
        if len(ended) == 2:
            raise MemoryError
        ended.append(seq.rid)
        return end(seq, finish, **options)

    state.end = ending  # type: ignore[method-assign]
    h.pause(PauseMode.ABORT)
    h.turn()
    state.end = end  # type: ignore[method-assign]
    assert refusal(h, 0).status_code == 500
    assert len(ended) == 2
    for rid in ended:
        outcome = h.outcomes[rid]
        assert outcome.finish is not None
        assert outcome.finish.type == "abort"
    finish(h)
    check(h, aborted=True)


@pytest.mark.parametrize("message", [Abort([1, 2]), Stop(1)])
def test_an_abort_that_raises_ends_nobody_else(message: Abort | Stop) -> None:
    h = prepared("abort")
    h.wire.inbox.append(message)
    state, end = h.scheduler.state, h.scheduler.state.end

    def ending(seq: Any, finish: Any, **options: Any) -> Any:
        raise MemoryError

    state.end = ending  # type: ignore[method-assign]
    h.turn()
    state.end = end  # type: ignore[method-assign]
    finish(h)
    check(h, aborted=True)


def test_an_answer_that_cannot_be_sent_is_an_error() -> None:
    h = Harness()
    send = h.wire.send

    def sending(message: Any) -> None:
        if isinstance(message, Reply) and not isinstance(message.answer, Refused):
            raise OverflowError("a number that no message can carry")
        send(message)

    h.wire.send = sending  # type: ignore[method-assign]
    h.wire.inbox.append(GetState(3))
    h.turn()
    assert refusal(h, 3).status_code == 500
