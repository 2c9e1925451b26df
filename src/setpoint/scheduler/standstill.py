"""Pausing: what happens to the open requests when the engine is told to stand still, and to their
time limits when it goes on (docs/controls.md).

Works on the scheduler's state between two steps, with no step in flight.
"""

from __future__ import annotations

from setpoint.core.messages import Finish, PauseMode, TokenEvent
from setpoint.core.records import Continued, Observer, Paused
from setpoint.scheduler.state import State

PAUSED = Finish("abort", message="Aborted, because generation was paused.")


class Standstill:
    def __init__(self, state: State, observer: Observer) -> None:
        self._state = state
        self._observer = observer

    def pause(self, mode: PauseMode) -> list[TokenEvent]:
        """Stand still from now on; a pause in force gets the new mode. Returns the events of the
        requests that end."""
        state = self._state
        assert not state.inflight, "the loop takes all results first"
        if state.pause is None:
            state.paused_at = state.now
        state.pause = mode
        events, num_retracted = [], 0
        if mode is PauseMode.ABORT:
            events = [state.end(seq, PAUSED) for seq in list(state.by_id.values())]
        elif mode is PauseMode.RETRACT:
            num_retracted = len(state.running)
            for seq in list(state.running.values()):
                state.send_back(seq)
        self._observer.on(
            Paused(
                mode=mode,
                num_aborted=len(events),
                num_retracted=num_retracted,
                num_queued=len(state.queue) + len(state.preparing),
                num_running=len(state.running),
            )
        )
        return events

    def resume(self) -> None:
        """Go on. The pause does not count towards the time limits of requests: it was not theirs to
        avoid."""
        state = self._state
        if state.pause is None:
            return
        for seq in state.by_id.values():
            seq.since += state.now - max(seq.since, state.paused_at)
        state.pause = None
        self._observer.on(
            Continued(
                paused_s=state.now - state.paused_at,
                num_queued=len(state.queue) + len(state.preparing),
                num_running=len(state.running),
            )
        )
