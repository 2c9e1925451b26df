"""The interface between the planes: the scheduler's loop drives an Executor and knows nothing of
tensors."""

from __future__ import annotations

from typing import Protocol

from setpoint.core.plan import StepPlan, TokenMasks
from setpoint.core.result import StepResult


class PendingStep(Protocol):
    """A submitted step. Contract: call ``finish`` exactly once, then ``result`` once; take results
    in submission order.

    An error that concerns one sequence (its parameters, its sampling) is reported in
    ``StepResult.failures`` and raises nothing; until the scheduler has seen it, the sequence's slot
    holds a state with which steps can run. An exception concerns the step as a whole and ends the
    engine, except a StepOutOfMemoryError: it makes the step void. Then nothing of it counts but
    its releases, and ``result`` is not called. Every sequence of the plan is admitted again before
    it has another row.
    """

    def finish(self, masks: TokenMasks | None) -> None:
        """Enqueue the step's sampling, with grammar masks if there are any. Raises
        StepOutOfMemoryError."""

    def result(self) -> StepResult:
        """Wait for the sampled ids."""
        ...


class Executor(Protocol):
    """Runs plans. ``submit`` enqueues the forward pass and does not wait for the device."""

    def submit(self, plan: StepPlan) -> PendingStep:
        """Begin a step. Raises StepOutOfMemoryError."""
        ...

    def idle(self) -> bool:
        """Called repeatedly while there is nothing to compute, between checks for messages: spend
        about a millisecond on preparing for later requests. Returns False if nothing is left to
        prepare until the next plan."""
        ...

    def shutdown(self) -> None: ...


class Clock(Protocol):
    """Monotonic seconds. The clock is injected so that a simulator can supply the time."""

    def now(self) -> float: ...
