"""The distribution from which a token is drawn: the softmax with temperature, truncated by top-k,
top-p and min-p (docs/sglang/sampling.md#order)."""

from __future__ import annotations

import numpy as np
import torch

from setpoint.engine.kernels.device import to_device
from setpoint.engine.sampling.columns import Columns

HEAD = 1024
"""Number of largest probabilities that are tried before the whole vocabulary is sorted. They nearly
always contain the nucleus."""


def distribution(logits: torch.Tensor, columns: Columns, peek: bool) -> torch.Tensor:
    """logits [R, V] after edits -> unnormalised probabilities [R, V], 0 for tokens that are
    excluded. peek: reading a value from the device costs nothing."""
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
    return probs


def _truncate(probs: torch.Tensor, columns: Columns, peek: bool) -> torch.Tensor:
    """probs [R, V], with 0 for the tokens that top-k, top-p and min-p exclude. Tokens tied at a
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
    # The nucleus is a share of the whole distribution or, in a row with min-p, of what top-k leaves
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
        # With min-p the nucleus is a share of the top-k mass, which needs all of the top k.
        inside = (
            (columns["top_p"] < 1)
            & (columns["min_p"] == 0)
            & (head.sum(-1).numpy() >= columns["top_p"])
        )
        enough = (columns["top_k"] <= HEAD) | inside
        if enough.all():
            return head
    return probs.sort(dim=-1, descending=True).values
