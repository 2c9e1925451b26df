"""Where the scheduler reports what it did; log lines, metrics and controllers are observers."""

from __future__ import annotations

from typing import Protocol

from setpoint.core.stats import PoolStats, Preemption, Retraction, StepStats


class Observer(Protocol):
    """Called synchronously from the loop: implementations must be quick and must not raise."""

    def on_step(self, stats: StepStats) -> None: ...

    def on_retraction(self, retraction: Retraction) -> None: ...

    def on_preemption(self, preemption: Preemption) -> None: ...

    def on_dropped(self, rid: str, why: str) -> None:
        """A request that had been accepted was answered 503: its time was up, or a more urgent one
        took its place in the queue."""

    def on_failed(self, rid: str, why: str) -> None:
        """An exception ended this request alone; its traceback has been logged where it was
        caught."""

    def on_fallback(self, what: str, why: str) -> None:
        """Something that was asked for is not done; told the first time only."""

    def on_clip(self, rid: str, wanted: int, granted: int) -> None:
        """A request's max_new_tokens was cut to what context and pool can ever hold."""

    def on_unservable(self, rid: str, why: str, pool: PoolStats) -> None:
        """A request was aborted because an empty engine could not admit it: a bug or a
        misconfiguration."""
