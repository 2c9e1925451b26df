"""Collects the hidden states of the slots that ask for them: each step's states are copied before
the next step overwrites them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from setpoint.core.plan import Admit, Rows
from setpoint.engine.runner.batch import ForwardBatch


class HiddenStateCollector:
    """Knows which slots ask. Costs other steps only the test of an empty set."""

    def __init__(self) -> None:
        self._slots: set[int] = set()

    def admit(self, admits: Sequence[Admit]) -> None:
        for admit in admits:
            self._slots.discard(admit.slot)
            if admit.options.wants_hidden_states:
                self._slots.add(admit.slot)

    def release(self, slots: Sequence[int]) -> None:
        if self._slots:
            self._slots.difference_update(slots)

    def take(
        self, rows: Rows, batch: ForwardBatch, hidden: torch.Tensor
    ) -> dict[int, tuple[int, torch.Tensor]]:
        """seq_id -> (first position of its row, the row's hidden states [count, H] float32), for
        the slots that ask. hidden: [>= T, H] of the step."""
        if not self._slots:
            return {}
        found = {}
        for row, (slot, seq_id) in enumerate(
            zip(rows.slots.tolist(), rows.seq_ids.tolist(), strict=True)
        ):
            if slot in self._slots:
                begin, end = int(batch.cu_q[row]), int(batch.cu_q[row + 1])
                states = hidden[begin:end].to(torch.float32, copy=True)
                found[seq_id] = int(batch.starts[row]), states
        return found
