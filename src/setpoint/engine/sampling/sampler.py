"""Chooses a token for each row, for all rows at once. It never waits for the device, except where
reading from it is free.

Each row's token depends only on its own logits, parameters, seed and position: a draw inverts the
row's cumulative distribution, in vocabulary order, at one uniform number, so neither the other rows
nor the method (sorting or not) matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from setpoint.core.plan import TokenMasks
from setpoint.core.request import Ids
from setpoint.engine.kernels.device import SharedTensor, to_device
from setpoint.engine.kernels.ops import Ops
from setpoint.engine.sampling.columns import Columns, SamplingRows
from setpoint.engine.sampling.distribution import distribution
from setpoint.engine.sampling.edits import edit_logits, rows_of
from setpoint.engine.sampling.facts import TokenFact, concatenate_facts, token_facts
from setpoint.engine.sampling.logprobs import Logprobs, concatenate_logprobs, output_logprobs
from setpoint.engine.sampling.random import uniform


@dataclass(slots=True, frozen=True)
class Sampled:
    """Sampled tokens, still on the device."""

    ids: SharedTensor
    """[>= S] int64; -1 where the logits were not finite."""
    logprobs: Logprobs | None
    """Logprobs of the rows that want them, in row order."""
    facts: Sequence[TokenFact] = ()


def sample(
    logits: torch.Tensor,
    rows: SamplingRows,
    masks: TokenMasks | None,
    ops: Ops,
    *,
    peek: bool,
    best: torch.Tensor | None = None,
) -> Sampled:
    """logits [S, V] -> one token per row; masks may be applied to ``logits`` in place. peek:
    reading a value from the device costs nothing (the device is the CPU). best: the logits'
    ``ops.best_tokens``, if already known."""
    if peek and best is not None and masks is not None:
        masks = _effective_masks(masks, rows, best)
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
    return with_reports(edited, ids, rows, ops, peek=peek)


def with_reports(
    edited: torch.Tensor, ids: torch.Tensor, rows: SamplingRows, ops: Ops, *, peek: bool
) -> Sampled:
    """The tokens ``ids`` [S] of the edited logits [S, V] with what rows want to know of them."""
    logprobs = (
        output_logprobs(edited, ids.clamp(min=0), rows, ops)
        if rows.columns["logprobs"].any()
        else None
    )
    facts = token_facts(edited, ids, rows, ops, peek=peek) if rows.columns["facts"].any() else []
    return Sampled(SharedTensor(ids), logprobs, facts)


def _effective_masks(
    masks: TokenMasks, rows: SamplingRows, best: torch.Tensor
) -> TokenMasks | None:
    """The masks that can change a token, a logprob or a fact. A greedy row whose best token is
    allowed keeps it, whatever else the mask excludes."""
    of_row = rows_of(masks, rows)
    columns, token = rows.columns[of_row], best.numpy()[of_row]
    words = masks.words.view(np.uint32)[np.arange(len(token)), np.maximum(token, 0) // 32]
    keeps = (words >> (token % 32).astype(np.uint32) & 1).astype(bool) & (token >= 0)
    # An edit of the row's logits may make another token the best.
    is_edited = columns["penalised"] | columns["biased"] | (columns["min_new"] > 0)
    needed = ~keeps | ~columns["greedy"] | columns["logprobs"] | columns["facts"] | is_edited
    if not needed.any():
        return None
    return masks if needed.all() else TokenMasks(masks.slots[needed], masks.words[needed])


def masks_of(masks: TokenMasks | None, slots: Ids) -> TokenMasks | None:
    """The masks of these slots; None if there are none."""
    if masks is None:
        return None
    mine = np.isin(masks.slots, slots)
    return TokenMasks(masks.slots[mine], masks.words[mine]) if mine.any() else None


def concatenate(blocks: Sequence[Sampled]) -> Sampled:
    """The results of all rows, from those of blocks of rows."""
    if len(blocks) == 1:
        return blocks[0]
    logprobs = [block.logprobs for block in blocks if block.logprobs is not None]
    begins = accumulate((len(block.ids.tensor) for block in blocks), initial=0)
    return Sampled(
        SharedTensor(torch.cat([block.ids.tensor for block in blocks])),
        concatenate_logprobs(logprobs) if logprobs else None,
        concatenate_facts(
            [(begin, block.facts) for begin, block in zip(begins, blocks, strict=False)]
        ),
    )


def _draw(logits: torch.Tensor, columns: Columns, peek: bool) -> torch.Tensor:
    """Draw a token from the distribution of each row: logits [R, V] -> [R] int64."""
    device = logits.device
    cumulative = distribution(logits, columns, peek).cumsum(dim=-1)
    total = cumulative[:, -1:]
    number = uniform(
        to_device(columns["seed"], device), to_device(columns["length"].astype(np.int64), device)
    ).unsqueeze(1)
    # The number is strictly below the total after rounding, so that a first token whose cumulative
    # probability exceeds it exists and has a positive probability.
    target = torch.minimum(
        (number * total).to(total.dtype), torch.nextafter(total, torch.zeros_like(total))
    )
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)
