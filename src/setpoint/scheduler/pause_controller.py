"""Pauses: what happens to the open requests when the engine is paused or gives memory back,
and to their time limits when it continues (docs/controls.md).

Works on the scheduler's state between two steps, with no step in flight.
"""

from __future__ import annotations

from collections.abc import Callable

from setpoint.core.control import PAUSE_FIRST, PAUSED, Operate, PauseMode
from setpoint.core.errors import RequestError, SetpointError
from setpoint.core.messages import Finish, TokenEvent
from setpoint.core.operations import (
    NEEDS_REST,
    RECORDING,
    STORAGE,
    LoadWeights,
    MemoryPart,
    Operation,
    Operator,
    RecordExperts,
    ReleaseMemory,
    RestoreMemory,
)
from setpoint.core.records import Continued, Observer, Operated, Paused
from setpoint.scheduler.state import State

ENDED = Finish("abort", message=PAUSED)


class PauseController:
    def __init__(self, state: State, observer: Observer) -> None:
        self._state = state
        self._observer = observer
        self._is_hold = False
        """Whether the pause is for an order to all engines, and no operator has asked for it."""

    def pause(
        self, mode: PauseMode, emit: Callable[[TokenEvent], object], *, is_hold: bool = False
    ) -> None:
        """Stand still from now on; a pause in force gets the new mode. ``emit`` gets the event of
        each request as soon as it has ended, so that none is lost if the next one raises."""
        state = self._state
        assert not state.inflight, "the loop takes all results first"
        self._begin()
        state.pause, self._is_hold = mode, is_hold
        num_aborted = num_retracted = 0
        if mode is PauseMode.ABORT:
            num_aborted = len(state.by_id)
            for seq in list(state.by_id.values()):
                emit(state.end(seq, ENDED))
        elif mode is PauseMode.RETRACT:
            num_retracted = len(state.running)
            for seq in list(state.running.values()):
                state.send_back(seq)
        self._observer.on(
            Paused(
                mode=mode,
                num_aborted=num_aborted,
                num_retracted=num_retracted,
                num_queued=len(state.queue) + len(state.preparing),
                num_running=len(state.running),
                is_hold=is_hold,
            )
        )

    def hold(self, *, flushes: bool) -> None:
        """Stand still if no step could be planned; a pause in force keeps its mode."""
        self._check_rest(flushes=flushes)
        if self._state.pause is None:
            self.pause(PauseMode.RETRACT, lambda event: None, is_hold=True)  # none runs

    def resume(self) -> None:
        """End the pause. The engine continues unless memory is still given back."""
        state = self._state
        if state.pause is None:
            return
        state.pause = None
        self._end()
        self._is_hold = False

    def operate(self, message: Operate, operator: Operator) -> str:
        """Carry out an operation. Returns the result of ``Operator.operate``. Raises SetpointError
        if it is impossible now. Even if it raises, the engine stands still as long as the operator
        does not have all the memory that steps need."""
        error = ""
        try:
            self._check(message.operation)
            path = operator.operate(message.id, message.operation)
            if isinstance(message.operation, STORAGE) and self._state.tiers is not None:
                self._state.tiers.forget_stored()
            if isinstance(message.operation, LoadWeights) and message.operation.flush_cache:
                self._state.flush()
        except SetpointError as refusal:
            error = str(refusal)
            raise
        except Exception as failure:
            error = type(failure).__name__
            raise
        finally:
            self._follow(operator.released)
            self._record(message, error)
        return path

    def _record(self, message: Operate, error: str) -> None:
        operation, parts = message.operation, tuple(sorted(self._state.released))
        name = type(operation).__name__
        if isinstance(operation, RecordExperts):
            name = RECORDING[operation.action]
        self._observer.on(Operated(message.id, name, parts, error))

    def _check(self, operation: Operation) -> None:
        """Raise RequestError if the operation does not fit the state of the requests or of the
        memory."""
        state, drops_cache = self._state, False
        if isinstance(operation, NEEDS_REST):
            self._check_rest(flushes=False)
        match operation:
            case ReleaseMemory(parts):
                again = sorted(state.released.intersection(parts))
                if again:
                    raise RequestError(
                        f"tags must not name memory that is already released: {', '.join(again)}."
                    )
                drops_cache = MemoryPart.KV_CACHE in parts
            case RestoreMemory(parts):
                if there := sorted(set(parts) - state.released):
                    raise RequestError(
                        f"tags must not name memory that is not released: {', '.join(there)}."
                    )
            case LoadWeights():
                drops_cache = operation.flush_cache
        if drops_cache:
            self._check_rest(flushes=True)

    def _check_rest(self, *, flushes: bool) -> None:
        """Raise RequestError if a step may be planned, or, for what flushes, if requests keep
        memory."""
        state = self._state
        if not state.is_at_rest:
            num = len(state.by_id)
            are_open = "1 request is open" if num == 1 else f"{num} requests are open"
            raise RequestError(f"An engine is not idle: {are_open}. {PAUSE_FIRST}.")
        if flushes and not state.can_flush:
            num = len(state.running)
            keep = "1 paused request keeps" if num == 1 else f"{num} paused requests keep"
            raise RequestError(
                f"{keep} memory in the KV cache. Pause again with"
                ' {"mode": "retract"}, which releases it and ends no request.'
            )

    def _follow(self, released: frozenset[MemoryPart]) -> None:
        """Stand still while any memory is released, and forget what was cached in it."""
        state = self._state
        if released - state.released:
            self._begin()
        if MemoryPart.KV_CACHE in released - state.released:
            state.flush()
        fewer = bool(state.released - released)
        state.released = set(released)
        if fewer:
            self._end()

    def _begin(self) -> None:
        """Note the time, before a reason for a standstill is set."""
        if not self._state.stands_still:
            self._state.still_since = self._state.now

    def _end(self) -> None:
        """Continue, unless another reason for the standstill is left. Time limits of requests are
        extended by the time that they could not use."""
        state = self._state
        if state.stands_still:
            return
        for seq in state.by_id.values():
            seq.since += state.now - max(seq.since, state.still_since)
        self._observer.on(
            Continued(
                paused_s=state.now - state.still_since,
                num_queued=len(state.queue) + len(state.preparing),
                num_running=len(state.running),
                was_hold=self._is_hold,
            )
        )
