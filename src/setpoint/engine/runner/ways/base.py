"""The seam of ways: what a way to run a forward pass is asked, and what it answers.

Works on the rows of one step. Knows nothing of plans or sampling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from setpoint.engine.runner.batch import ForwardBatch
from setpoint.engine.runner.forward_pass import Answer


class Way(Protocol):
    """Contract: the same results as the eager way, bit for bit unless its module says otherwise.

    What a way returns may be its own tensors, which its next run overwrites, with more rows than
    the step has. So a way may have input buffers that its programs were captured with, and sizes
    that they were captured for: ``takes`` accepts what fits the largest, ``run`` copies the batch
    into the buffers of the next size, fills their rest with rows that nobody reads, and runs that
    size's program. A row that fills up is one token of the slot table's ``padding_slot`` at
    position 0: its K and V go to the dummy page.

    Programs that read the tensors of the slot table must be captured again when it has grown
    (``SlotTable.ids`` and ``pages`` are then others).
    """

    name: str
    """As in ``StepResult.way``."""
    num_bytes: int
    """Device memory that it keeps between steps."""

    def takes(self, batch: ForwardBatch) -> bool:
        """Whether it can run this batch."""
        ...

    def run(self, batch: ForwardBatch, *, with_logits: bool) -> Ran:
        """``with_logits``: the batch has 1 to LOGITS_ROWS sampling rows, and their answer is
        wanted."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, H] -> [S, V], for rows whose logits ``run`` was not asked for."""
        ...


@dataclass(slots=True, frozen=True)
class Ran:
    """A forward pass on its way."""

    way: Way
    """The one that ran: not always the one that was asked."""
    hidden: torch.Tensor
    """[>= T, H]."""
    answer: Answer | None
    """None where it was not wanted."""
