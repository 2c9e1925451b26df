"""The seam between the planes: the scheduler's loop drives an Executor and knows nothing of
tensors."""

from __future__ import annotations

from typing import Protocol

from setpoint.core.plan import StepPlan, TokenMasks
from setpoint.core.result import StepResult


class PendingStep(Protocol):
    """A submitted step. Contract: ``finish`` exactly once, then ``result`` once; results are taken
    in submission order.

    What goes wrong for one sequence (its parameters, its sampling) is in ``StepResult.failures``
    and raises nothing; until the scheduler has seen that, its slot holds a sequence that can be
    computed. What raises concerns the step as a whole, and ends the engine.
    """

    def finish(self, masks: TokenMasks | None) -> None:
        """Enqueue sampling of this step, under the masks if any."""

    def result(self) -> StepResult:
        """Wait for the sampled ids."""
        ...


class Executor(Protocol):
    """Runs plans. ``submit`` enqueues the forward pass and does not wait for the device."""

    def submit(self, plan: StepPlan) -> PendingStep: ...

    def idle(self) -> bool:
        """Called between looks for messages while there is nothing to compute: for about a
        millisecond, prepare for requests to come. False if nothing is left to do until the next
        plan."""
        ...

    def shutdown(self) -> None: ...


class Clock(Protocol):
    """Monotonic seconds. Injected, so that a simulator can own time."""

    def now(self) -> float: ...
