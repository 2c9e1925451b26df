"""Facts about sampled tokens that a request may ask for by name (``RequestOptions.token_facts``).

A fact is a list of numbers for each token. It is computed for the rows that want it, and passes
through the scheduler unread, so a new fact needs only a function in ``COMPUTE`` and an API that
asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from setpoint.core.request import MAX_SAMPLING_MASK, SAMPLING_MASK
from setpoint.engine.kernels.device import to_device
from setpoint.engine.kernels.ops import Ops
from setpoint.engine.sampling.columns import Columns, SamplingRows
from setpoint.engine.sampling.distribution import distribution
from setpoint.engine.sampling.logprobs import in_blocks

UNUSED = -1
"""Pads a token's list to the width of the tensor."""


@dataclass(slots=True, frozen=True)
class TokenFact:
    """One fact about some rows, still on the device."""

    name: str
    rows: np.ndarray
    """[R]: which of the sampling rows."""
    numbers: torch.Tensor
    """[R, width] int32: each row's list, padded with UNUSED."""


def sampling_mask(
    logits: torch.Tensor, ids: torch.Tensor, columns: Columns, ops: Ops, *, peek: bool
) -> torch.Tensor:
    """The tokens from which each token was drawn, that is, those that top-k, top-p and min-p leave:
    [R, at most MAX_SAMPLING_MASK], the likeliest first. For a greedy token, the token itself."""
    probs = distribution(logits, columns, peek).contiguous()
    tokens = ops.top_tokens(probs, min(MAX_SAMPLING_MASK, probs.shape[1]))
    mask = tokens.where(probs.gather(1, tokens) > 0, UNUSED)
    alone = torch.full_like(mask, UNUSED)
    alone[:, 0] = ids
    greedy = to_device(columns["greedy"], logits.device).unsqueeze(1)
    return torch.where(greedy, alone, mask).int()


COMPUTE: dict[str, Callable[..., torch.Tensor]] = {SAMPLING_MASK: sampling_mask}
"""Name -> function: (logits [R, V] after edits, sampled ids [R], parameters [R]) -> numbers [R,
width]."""


def token_facts(
    logits: torch.Tensor, ids: torch.Tensor, rows: SamplingRows, ops: Ops, *, peek: bool
) -> list[TokenFact]:
    """The facts that the rows want. logits [S, V] after edits, ids [S]."""
    found = []
    for name, compute in COMPUTE.items():
        wanted = np.flatnonzero([name in rows.facts_of(slot) for slot in rows.slots.tolist()])
        for which in in_blocks(wanted, logits.shape[1]):
            index = to_device(which, logits.device)
            numbers = compute(logits[index], ids[index], rows.columns[which], ops, peek=peek)
            found.append(TokenFact(name, which, numbers))
    return found


def concatenate_facts(blocks: Sequence[tuple[int, Sequence[TokenFact]]]) -> list[TokenFact]:
    """The facts of all rows. blocks: (first row, facts) of each block of rows."""
    return [replace(fact, rows=fact.rows + first) for first, facts in blocks for fact in facts]
