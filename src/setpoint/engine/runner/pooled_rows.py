"""Embeddings of pooled slots: the hidden state of a prompt's last token, or the mean over the
hidden states of all its tokens.

Works on the hidden states of each step. A mean is summed chunk by chunk, on the device, in float64,
so that the division of the prompt into chunks does not change the float32 result. Knows nothing of
normalisation or of the use of an embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from setpoint.core.plan import Admit, Rows
from setpoint.core.request import PoolingKind
from setpoint.engine.runner.batch import ForwardBatch
from setpoint.engine.sampling.columns import Columns


@dataclass(slots=True, frozen=True)
class Pooled:
    """The embeddings that a step completed; still on the device."""

    seq_ids: list[int]
    """[P]: sequences whose last prompt token this step computed."""
    vectors: torch.Tensor
    """[P, H] float32."""


class Pooler:
    """Keeps the sums of pooled slots. A slot's state begins with its admission, which overwrites
    that of an earlier sequence, and ends with its embedding."""

    def __init__(self) -> None:
        self._kinds: dict[int, PoolingKind] = {}
        self._sums: dict[int, torch.Tensor | float] = {}
        """Slot -> [H] float64, the sum over the tokens computed so far; 0.0 before the first."""

    def admit(self, admits: Sequence[Admit]) -> None:
        for admit in admits:
            self.release((admit.slot,))
            if admit.options.pooling is not None:
                self._kinds[admit.slot] = admit.options.pooling
                self._sums[admit.slot] = 0.0

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._kinds.pop(slot, None)
            self._sums.pop(slot, None)

    def pool(
        self, rows: Rows, batch: ForwardBatch, hidden: torch.Tensor, columns: Columns
    ) -> Pooled | None:
        """The embeddings that this step completes; None if there are none. hidden: [T, H] of the
        step's rows; columns: [slots] of SLOT_DTYPE."""
        if not self._kinds:
            return None
        seq_ids, vectors = [], []
        bounds = batch.cu_q.tolist()
        ends = batch.kv_lens.tolist()
        for row, (slot, seq_id) in enumerate(
            zip(rows.slots.tolist(), rows.seq_ids.tolist(), strict=True)
        ):
            kind = self._kinds.get(slot)
            if kind is None:
                continue
            is_last = ends[row] == columns["num_prompt"][slot]
            if kind == "mean":
                self._sums[slot] = self._sums[slot] + hidden[bounds[row] : bounds[row + 1]].sum(
                    0, dtype=torch.float64
                )
            if is_last:
                seq_ids.append(seq_id)
                vectors.append(
                    self._sums[slot] / ends[row] if kind == "mean" else hidden[bounds[row + 1] - 1]
                )
                self.release((slot,))
        return (
            Pooled(seq_ids, torch.stack([vector.float() for vector in vectors]))
            if vectors
            else None
        )
