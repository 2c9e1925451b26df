"""Turns the rows of a plan into the tensors of a forward pass; vectorised, no loop over rows.

T tokens, n rows, S sampling rows. Row i owns tokens [cu_q[i], cu_q[i+1]) at positions starts[i] .. starts[i] + counts[i] - 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from setpoint.core.plan import OWN_LENGTH, Rows
from setpoint.core.request import Ids
from setpoint.engine.attention.base import AttentionBatch
from setpoint.engine.kernels.device import to_device
from setpoint.engine.runner.rows import SlotTable


@dataclass(slots=True, frozen=True)
class ForwardBatch:
    """Built by the runner for one step; read by the model and the sampler."""

    input_ids: torch.Tensor
    """[T] int32."""
    attention: AttentionBatch
    starts: npt.NDArray[np.int32]
    """[n], OWN_LENGTH resolved."""
    sample_slots: Ids
    """[S]."""
    sample_index: torch.Tensor
    """[S] int64: each sampling row's last token among the T."""


def build_batch(rows: Rows, table: SlotTable, page_size: int) -> ForwardBatch:
    device = table.device
    slots, counts = rows.slots, rows.counts
    lengths = table.columns["length"][slots]
    starts = np.where(rows.starts == OWN_LENGTH, lengths - 1, rows.starts).astype(np.int32)
    ends = starts + counts
    assert (ends <= lengths).all(), "a row beyond the known tokens"
    assert (ends == lengths)[rows.samples].all(), "a sampling row that does not end at the last known token"
    cu_q = np.zeros(len(slots) + 1, np.int32)
    np.cumsum(counts, out=cu_q[1:])
    if cu_q[-1] == len(slots):
        token_slots, token_positions = slots, starts
    else:
        token_slots = np.repeat(slots, counts)
        token_positions = np.arange(cu_q[-1], dtype=np.int32) + np.repeat(starts - cu_q[:-1], counts)
    slot = to_device(token_slots, device)
    positions = to_device(token_positions.astype(np.int64), device)
    page = table.pages[slot, positions // page_size].long()
    attention = AttentionBatch(
        positions=positions,
        kv_index=page * page_size + positions % page_size,
        cu_q=to_device(cu_q, device),
        cu_q_host=cu_q,
        kv_lens=to_device(ends, device),
        kv_lens_host=ends,
        slots=to_device(slots, device),
        page_table=table.pages,
    )
    last_tokens = cu_q[1:][rows.samples] - 1
    return ForwardBatch(
        input_ids=table.ids[slot, positions],
        attention=attention,
        starts=starts,
        sample_slots=slots[rows.samples],
        sample_index=to_device(last_tokens.astype(np.int64), device),
    )
