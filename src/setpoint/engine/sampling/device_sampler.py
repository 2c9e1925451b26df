"""Samples rows on a device with kernels of its own (``kernels.device_sampling``).

The tokens are those of ``sampling.sampler`` up to rounding: a number that falls onto the border
between two tokens, or a token at the border of top-p, may fall to the other side. What the kernels
need is on the device already, except masks.
"""

from __future__ import annotations

import numpy as np
import torch

from setpoint.core.plan import TokenMasks
from setpoint.core.request import Ids
from setpoint.engine.kernels.device import to_device
from setpoint.engine.kernels.device_sampling import DeviceMasks, Draws
from setpoint.engine.kernels.ops import Ops
from setpoint.engine.sampling.columns import Columns, SamplingRows, is_held
from setpoint.engine.sampling.edits import rows_of
from setpoint.engine.sampling.sampler import Sampled, with_reports


def sample_on_device(
    logits: torch.Tensor,
    rows: SamplingRows,
    masks: TokenMasks | None,
    ops: Ops,
    *,
    best: torch.Tensor | None = None,
) -> Sampled:
    """Does what ``sampler.sample`` does. The tokens are written to the table of ids too."""
    kernels, columns, known = ops.sampling, rows.columns, rows.on_device
    edits = bool((columns["penalised"] | columns["biased"] | is_held(columns)).any())
    if edits or masks is not None:
        sent = None if masks is None else _sent(masks, rows, logits.device)
        logits = kernels.edit(logits, known, sent, in_place=not edits)
    draws = _draws(columns)
    if best is None or edits or masks is not None or draws != Draws.NONE:
        ids = kernels.choose(logits, known, draws)
    else:
        ids = best
        kernels.place(ids, known)
    return with_reports(logits, ids, rows, ops, peek=False)


def _draws(columns: Columns) -> Draws:
    drawn = columns[~columns["greedy"]]
    if not len(drawn):
        return Draws.NONE
    cut = drawn["truncated"] | (drawn["min_p"] > 0)
    return Draws.TRUNCATED if cut.any() else Draws.WHOLE


def _sent(masks: TokenMasks, rows: SamplingRows, device: torch.device) -> DeviceMasks:
    """The masks in one copy."""
    of_row = np.full(len(rows.slots), -1, np.int32)
    of_row[rows_of(masks, rows)] = np.arange(len(masks.slots))
    numbers = to_device(np.concatenate((of_row, masks.words.ravel())), device)
    return DeviceMasks(numbers[: len(of_row)], numbers[len(of_row) :].view(masks.words.shape))


def entry_numbers(rows: SamplingRows) -> Ids:
    """The ``TokenEntries`` of the rows as one array: ends, tokens, bits of the values. Empty if no
    row has any."""
    held, biased = is_held(rows.columns), rows.columns["biased"]
    listed = np.flatnonzero(held | biased)
    if not len(listed):
        return np.zeros(0, np.int32)
    counts = np.zeros((len(rows.slots), 2), np.int32)
    tokens, values = [], []
    for row in listed.tolist():
        lists = rows.lists[int(rows.slots[row])]
        stop_ids = lists.stop_ids if held[row] else lists.stop_ids[:0]
        counts[row] = len(stop_ids), len(lists.bias)
        tokens += [stop_ids, lists.bias_ids]
        values += [np.zeros(len(stop_ids), np.float32), lists.bias]
    ends = np.append(0, counts.ravel().cumsum())
    parts = ends, np.concatenate(tokens), np.concatenate(values).view(np.int32)
    return np.concatenate([part.astype(np.int32) for part in parts])
