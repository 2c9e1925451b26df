"""The interface of the ways to run a forward pass, and the table of those that capture steps.

A way works on the rows of one step. It knows nothing of plans or sampling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from setpoint.engine.kernels.kernel_registry import resolve
from setpoint.engine.kernels.ops import KernelsUnavailable
from setpoint.engine.layers.context import Backends
from setpoint.engine.runner.batch import ForwardBatch
from setpoint.engine.runner.forward_pass import ForwardPass, StepLogits

CAPTURED = {
    "cpu": "setpoint.engine.runner.replay_way:ReplayWay",
    "cuda": "setpoint.engine.runner.graph_way:GraphWay",
}
"""Device type -> factory ``create(forward_pass, backends, *, with_head) -> CapturedWay``, for the
devices that capture steps. It raises NotCapturable with the reason if this model's cannot be, and
KernelsUnavailable if what captures cannot run here."""


class Way(Protocol):
    """Contract: the results are those of the eager way, bit for bit unless the way's module says
    otherwise.

    A way may return its own tensors, which have more rows than the step and are overwritten by its
    next run. So a way may capture its programs for a few sizes, with input buffers of its own:
    ``takes`` accepts what fits the largest size; ``run`` copies the batch into the buffers of the
    next larger size, fills their remaining rows with padding that nobody reads, and runs the
    program of that size. A padding row is one token of the slot table's ``padding_slot`` at
    position 0: its K and V go to the dummy page.

    Programs that read the tensors of the slot table must be captured again when the table has
    grown, because ``SlotTable.ids`` and ``pages`` are then new tensors.
    """

    name: str
    """The name that ``StepResult.way`` reports."""
    num_bytes: int
    """Device memory that the way keeps between steps."""

    def takes(self, batch: ForwardBatch) -> bool:
        """Whether this way can run the batch."""
        ...

    def run(self, batch: ForwardBatch, *, with_logits: bool) -> Ran:
        """Run the forward pass. with_logits: the caller wants the logits of the sampling rows, of
        which there are 1 to ``core.limits.logits_rows``."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of rows for which ``run`` computed none: hidden [S, H] -> [S, V]."""
        ...


@dataclass(slots=True, frozen=True)
class Ran:
    """A forward pass that has been started; its tensors are still on the device."""

    way: Way
    """The way that ran, which is not always the one that was called."""
    hidden: torch.Tensor
    """[>= T, H]."""
    answer: StepLogits | None
    """None if logits were not wanted."""


class CapturedWay(Way, Protocol):
    """A way that captured the forward pass when it was made, and repeats it."""

    why_partly_eager: str
    """Why some sizes, or the logits, are not captured too; empty if all are that could be."""


@runtime_checkable
class TimedWay(Protocol):
    """A way that can measure its kernels."""

    def start_timing(self) -> None:
        """Measure the kernels from now on."""
        ...

    def take_times(self) -> dict[str, float]:
        """Seconds per kind of kernel (``kernels.program.KINDS``) since the last call. What was
        measured before the slot table grew is lost."""
        ...


def captured_way(forward_pass: ForwardPass, backends: Backends, *, with_head: bool) -> CapturedWay:
    """The way of the forward pass's device that captures steps. with_head: whether the model has
    logits. Raises NotCapturable or KernelsUnavailable with the reason if there is none."""
    kind = forward_pass.device.type
    if kind not in CAPTURED:
        raise KernelsUnavailable(f"no step can be captured on {kind}")
    return resolve(CAPTURED[kind])(forward_pass, backends, with_head=with_head)
