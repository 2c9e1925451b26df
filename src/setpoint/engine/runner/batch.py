"""Turns the rows of a plan into the input of a forward pass; vectorised, no loop over rows.

Shapes: T tokens, n rows, S sampling rows. Row i owns tokens [cu_q[i], cu_q[i+1]) at positions
starts[i] .. kv_lens[i] - 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from setpoint.core.plan import OWN_LENGTH, Rows
from setpoint.core.request import Ids


@dataclass(slots=True, frozen=True)
class ForwardBatch:
    """The input of one step's forward pass, on the host; built by the runner."""

    num_tokens: int
    """T, the tokens of the step."""
    slots: Ids
    """[n]."""
    cu_q: Ids
    """[n + 1]."""
    kv_lens: Ids
    """[n]: each row's number of positions once this step has computed its tokens."""
    starts: Ids
    """[n]: position of each row's first token."""
    sample_slots: Ids
    """[S]."""
    sample_index: Ids
    """[S]: index of each sampling row's last token among the T."""


def build_batch(rows: Rows, lengths: Ids) -> ForwardBatch:
    """The input for these rows. lengths: how many tokens are known of each slot."""
    slots = rows.slots
    lengths = lengths[slots]
    starts = np.where(rows.starts == OWN_LENGTH, lengths - rows.counts, rows.starts).astype(
        np.int32
    )
    ends = starts + rows.counts
    assert (ends <= lengths).all(), "a row beyond the known tokens"
    sampling = rows.sampling
    assert (ends == lengths)[sampling].all(), (
        "a sampling row that does not end at the last known token"
    )
    cu_q = np.zeros(len(slots) + 1, np.int32)
    np.cumsum(rows.counts, out=cu_q[1:])
    return ForwardBatch(
        num_tokens=int(cu_q[-1]),
        slots=slots,
        cu_q=cu_q,
        kv_lens=ends,
        starts=starts,
        sample_slots=slots[sampling],
        sample_index=cu_q[1:][sampling] - 1,
    )


_NONE = np.zeros(0, np.int32)
NO_ROWS = ForwardBatch(0, _NONE, np.zeros(1, np.int32), _NONE, _NONE, _NONE, _NONE)
"""The batch of an engine that takes part in a step without tokens of its own."""
