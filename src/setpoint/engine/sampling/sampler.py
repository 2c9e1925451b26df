"""Chooses a token for each row, for all rows at once. It never waits for the device unless told
that reading from it is free.

Each row's token depends only on its own logits, parameters, seed and position: a draw inverts the
row's cumulative distribution, in vocabulary order, at one uniform number, so neither the other rows
nor the path taken (sorting or not) matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from setpoint.core.plan import TokenMasks
from setpoint.core.request import Ids
from setpoint.engine.kernels.device import Shared, to_device
from setpoint.engine.kernels.ops import Ops
from setpoint.engine.sampling.columns import Columns, SamplingRows
from setpoint.engine.sampling.edits import edit_logits, rows_of
from setpoint.engine.sampling.logprobs import Logprobs, joined_logprobs, output_logprobs
from setpoint.engine.sampling.random import uniform

HEAD = 1024
"""Number of largest probabilities that are tried before the whole vocabulary is sorted; a nucleus
nearly always fits in them."""


@dataclass(slots=True, frozen=True)
class Sampled:
    """Sampled tokens, still on the device."""

    ids: Shared
    """[>= S] int64; -1 where the logits were not finite."""
    logprobs: Logprobs | None
    """Logprobs of the rows that want them, in row order."""


def sample(
    logits: torch.Tensor,
    rows: SamplingRows,
    masks: TokenMasks | None,
    ops: Ops,
    *,
    peek: bool,
    best: torch.Tensor | None = None,
) -> Sampled:
    """logits [S, V] -> a token per row; masks may overwrite logits. ``peek``: reading a value from
    the device costs nothing (the device is the CPU). ``best``: the logits' ``ops.best_tokens`` if
    they are known."""
    if peek and best is not None and masks is not None:
        masks = _deciding(masks, rows, best)
    edited = edit_logits(logits, rows, masks, ops)
    if best is None or edited is not logits:
        ids = ops.best_tokens(edited)
    elif masks is None:
        ids = best
    else:
        index = to_device(rows_of(masks, rows), logits.device)
        ids = best.index_put((index,), ops.best_tokens(logits[index]))
    drawn = np.flatnonzero(~rows.columns["greedy"])
    if len(drawn) == len(ids):
        ids = _draw(edited, rows.columns, peek).where(ids >= 0, -1)
    elif len(drawn):
        index = to_device(drawn, logits.device)
        ids = ids.index_put(
            (index,), _draw(edited[index], rows.columns[drawn], peek).where(ids[index] >= 0, -1)
        )
    logprobs = (
        output_logprobs(edited, ids.clamp(min=0), rows, ops)
        if rows.columns["logprobs"].any()
        else None
    )
    return Sampled(Shared(ids), logprobs)


def _deciding(masks: TokenMasks, rows: SamplingRows, best: torch.Tensor) -> TokenMasks | None:
    """The masks that can change a token or a logprob. A greedy row whose best token is allowed
    keeps it, whatever else is not."""
    of_row = rows_of(masks, rows)
    columns, token = rows.columns[of_row], best.numpy()[of_row]
    words = masks.words.view(np.uint32)[np.arange(len(token)), np.maximum(token, 0) // 32]
    keeps = (words >> (token % 32).astype(np.uint32) & 1).astype(bool) & (token >= 0)
    # An edit of the row's logits may make another token the best.
    is_edited = columns["penalised"] | columns["biased"] | (columns["min_new"] > 0)
    needed = ~keeps | ~columns["greedy"] | columns["logprobs"] | is_edited
    if not needed.any():
        return None
    return masks if needed.all() else TokenMasks(masks.slots[needed], masks.words[needed])


def masks_of(masks: TokenMasks | None, slots: Ids) -> TokenMasks | None:
    """The masks of these slots only; None if there are none."""
    if masks is None:
        return None
    mine = np.isin(masks.slots, slots)
    return TokenMasks(masks.slots[mine], masks.words[mine]) if mine.any() else None


def joined(blocks: Sequence[Sampled]) -> Sampled:
    """Joins the results of blocks of rows into one."""
    if len(blocks) == 1:
        return blocks[0]
    logprobs = [block.logprobs for block in blocks if block.logprobs is not None]
    return Sampled(
        Shared(torch.cat([block.ids.tensor for block in blocks])),
        joined_logprobs(logprobs) if logprobs else None,
    )


def _draw(logits: torch.Tensor, columns: Columns, peek: bool) -> torch.Tensor:
    """Draw a token from the distribution of each row: logits [R, V] -> [R] int64."""
    device = logits.device
    probs = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if (columns["temperature"] != 1).any():
        probs = probs / to_device(columns["temperature"], device).to(probs.dtype).unsqueeze(1)
    probs = torch.softmax(probs, dim=-1)
    cut = np.flatnonzero(columns["truncated"] | (columns["min_p"] > 0))
    if len(cut) == len(columns):
        probs = _truncate(probs, columns, peek)
    elif len(cut):
        index = to_device(cut, device)
        probs[index] = _truncate(probs[index], columns[cut], peek)
    cumulative = probs.cumsum(dim=-1)
    total = cumulative[:, -1:]
    number = uniform(
        to_device(columns["seed"], device), to_device(columns["length"].astype(np.int64), device)
    ).unsqueeze(1)
    # The number is strictly below the total after rounding, so that a first token whose cumulative
    # probability exceeds it exists and has a positive probability.
    target = torch.minimum(
        (number * total).to(probs.dtype), torch.nextafter(total, torch.zeros_like(total))
    )
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


def _truncate(probs: torch.Tensor, columns: Columns, peek: bool) -> torch.Tensor:
    """probs [R, V] with the tokens that top-k, top-p and min-p exclude set to 0. Tokens tied at a
    limit stay."""
    device = probs.device
    min_p = to_device(columns["min_p"], device).to(probs.dtype).unsqueeze(1)
    if not columns["truncated"].any():
        return probs.where(probs >= min_p * probs.amax(dim=-1, keepdim=True), 0)
    largest = _largest(probs, columns, peek)
    cumulative = largest.cumsum(dim=-1)
    k = to_device(
        np.minimum(columns["top_k"], largest.shape[1]).astype(np.int64), device
    ).unsqueeze(1)
    # The nucleus is measured on the whole distribution, but in a row with min-p on what top-k left
    # (docs/sglang/sampling.md#order).
    nucleus = to_device(columns["top_p"], device).to(probs.dtype).unsqueeze(1)
    nucleus = torch.where(min_p > 0, nucleus * cumulative.gather(1, k - 1), nucleus)
    nucleus = nucleus.masked_fill(to_device(columns["top_p"] >= 1, device).unsqueeze(1), torch.inf)
    num_kept = torch.minimum(
        (cumulative - largest < nucleus).sum(dim=-1, keepdim=True).clamp(min=1), k
    )
    border = torch.maximum(largest.gather(1, num_kept - 1), min_p * largest[:, :1])
    return probs.where(probs >= border, 0)


def _largest(probs: torch.Tensor, columns: Columns, peek: bool) -> torch.Tensor:
    """The largest probabilities in descending order, as many as any row's top-k and top-p can
    need."""
    vocab_size = probs.shape[1]
    widest = min(int(columns["top_k"].max()), vocab_size)
    if widest <= HEAD:
        return probs.topk(widest, dim=-1).values
    if peek and vocab_size > HEAD:
        head = probs.topk(HEAD, dim=-1).values
        # With min-p the nucleus is a share of the whole top-k mass, so a longer top-k must be seen
        # in full.
        inside = (
            (columns["top_p"] < 1)
            & (columns["min_p"] == 0)
            & (head.sum(-1).numpy() >= columns["top_p"])
        )
        enough = (columns["top_k"] <= HEAD) | inside
        if enough.all():
            return head
    return probs.sort(dim=-1, descending=True).values
