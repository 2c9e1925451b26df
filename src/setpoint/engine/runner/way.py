"""The interface of the ways to run a forward pass.

A way works on the rows of one step. It knows nothing of plans or sampling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from setpoint.engine.runner.batch import ForwardBatch
from setpoint.engine.runner.forward_pass import StepLogits


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
        which there are 1 to LOGITS_ROWS."""
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
