"""Changes to logits before a token is chosen, in SGLang's order: penalties, minimum length, mask,
bias (docs/sglang/sampling.md#order)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from setpoint.core.plan import TokenMasks
from setpoint.engine.kernels.device import to_device
from setpoint.engine.kernels.ops import Ops
from setpoint.engine.sampling.columns import SamplingRows, is_held


def edit_logits(
    logits: torch.Tensor, rows: SamplingRows, masks: TokenMasks | None, ops: Ops
) -> torch.Tensor:
    """logits [S, V] -> edited logits [S, V]. If masks are the only edit, they are applied in place,
    which is harmless to repeat. If no row wants an edit, the result is the same tensor; otherwise
    it is a copy in fp32 or wider."""
    columns = rows.columns
    penalised = np.flatnonzero(columns["penalised"])
    held = np.flatnonzero(is_held(columns))
    biased = np.flatnonzero(columns["biased"])
    if not (len(penalised) or len(held) or len(biased)):
        if masks is not None:
            _mask(logits, rows, masks, ops)
        return logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    if len(penalised):
        _add_penalties(logits, rows, penalised)
    if len(held):
        logits[_pairs(rows, held, "stop_ids", logits.device)] = -torch.inf
    if len(penalised):
        _scale_repeated(logits, rows, penalised)
    if masks is not None:
        _mask(logits, rows, masks, ops)
    if len(biased):
        values = to_device(
            np.concatenate([rows.lists[slot].bias for slot in rows.slots[biased].tolist()]),
            logits.device,
        )
        logits.index_put_(
            _pairs(rows, biased, "bias_ids", logits.device),
            values.to(logits.dtype),
            accumulate=True,
        )
    return logits


def _add_penalties(logits: torch.Tensor, rows: SamplingRows, which: np.ndarray) -> None:
    """logit -= frequency · count + presence · [count > 0], with counts over the outputs."""
    counts = _counts(rows, which, logits, outputs_only=True)
    columns = rows.columns[which]
    frequency, presence = (
        to_device(columns[name], logits.device).to(logits.dtype).unsqueeze(1)
        for name in ("frequency", "presence")
    )
    logits[to_device(which, logits.device)] -= counts * frequency + (counts > 0) * presence


def _scale_repeated(logits: torch.Tensor, rows: SamplingRows, which: np.ndarray) -> None:
    """Apply the repetition penalty to the tokens that occur in the prompt or the outputs: divide
    positive logits by it, multiply the others by it."""
    seen = _counts(rows, which, logits, outputs_only=False) > 0
    index = to_device(which, logits.device)
    values = logits[index]
    penalty = (
        to_device(rows.columns["repetition"][which], logits.device).to(logits.dtype).unsqueeze(1)
    )
    logits[index] = torch.where(
        seen, torch.where(values > 0, values / penalty, values * penalty), values
    )


def _counts(
    rows: SamplingRows, which: np.ndarray, logits: torch.Tensor, *, outputs_only: bool
) -> torch.Tensor:
    """[len(which), V]: how often each token occurs in the row's prompt and outputs, or in the
    outputs only."""
    device = logits.device
    columns = rows.columns[which]
    history = rows.history[
        to_device(rows.slots[which], device), : int(columns["length"].max())
    ].long()
    position = torch.arange(history.shape[1], device=device)
    counted = position < to_device(columns["length"], device).unsqueeze(1)
    if outputs_only:
        counted &= position >= to_device(columns["num_prompt"], device).unsqueeze(1)
    counts = torch.zeros(len(which), logits.shape[1], dtype=logits.dtype, device=device)
    return counts.scatter_add_(1, history, counted.to(logits.dtype))


def rows_of(masks: TokenMasks, rows: SamplingRows) -> npt.NDArray[np.int64]:
    """[masks]: the row to which each mask belongs."""
    row_of_slot = {slot: row for row, slot in enumerate(rows.slots.tolist())}
    return np.array([row_of_slot[slot] for slot in masks.slots.tolist()], np.int64)


def _mask(logits: torch.Tensor, rows: SamplingRows, masks: TokenMasks, ops: Ops) -> None:
    """Set logits to -inf where the row's mask bit is 0."""
    index = to_device(rows_of(masks, rows), logits.device)
    ops.mask_tokens(logits, index, to_device(masks.words, logits.device))


def _pairs(
    rows: SamplingRows, which: np.ndarray, name: str, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """(row, token) index pairs from a token list of each row in ``which``."""
    lists = [getattr(rows.lists[slot], name) for slot in rows.slots[which].tolist()]
    row = np.repeat(which, [len(tokens) for tokens in lists])
    return to_device(row, device), to_device(np.concatenate(lists), device)
