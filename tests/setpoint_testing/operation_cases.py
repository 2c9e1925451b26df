"""Sizes at which implementations of the operations are compared with the reference, and what counts
as equal."""

from __future__ import annotations

import itertools

import torch

from setpoint.engine.kernels.ops import Ops, Routing

BF16, FP32 = torch.bfloat16, torch.float32
Latents = tuple[torch.Tensor, ...]
ROWS_COLUMNS = list(itertools.product((1, 3, 67), (16, 100, 576, 1536)))
ROTARIES = [
    (9, 3, 64, 64, 5),
    (4, 4, 20, 20, 1),
    (2, 1, 128, 128, 300),
    (6, 2, 128, 96, 7),
    (3, 1, 20, 6, 40),
]
"""Heads, key/value heads, size of a head, rotated dimensions, tokens."""
LATENTS = [(1, 16), (67, 64), (3, 6)]
"""Rows, rotated dimensions."""
VOCABULARIES = (1, 7, 16, 131, 4096)
ROUTES = [(1, 1), (8, 2), (9, 3), (60, 4), (128, 8)]
"""Experts, of which a token chooses so many."""
GROUPED_ROUTES = [(8, 3, 4, 2), (60, 6, 3, 1), (256, 8, 8, 4), (6, 6, 2, 2)]
"""Experts, of which a token chooses so many, groups, open groups."""


def check_groups_of_equal_scores(ops: Ops) -> None:
    """Groups of equal scores are taken in order, and a correction only chooses."""
    routing = Routing(3, "sigmoid", True, 1.0, 4, 2, 2)
    logits = torch.zeros(1, 8)
    correction = torch.tensor([0.0, 0, 1, 0, 1, 0, 0, 0])
    assert ops.route(logits, routing)[0].tolist() == [[0, 1, 2]]
    ids, weights = ops.route(logits, routing, correction)
    assert ids.tolist() == [[2, 4, 3]]
    assert torch.allclose(weights, torch.full((1, 3), 1 / 3))
    weights = ops.route(torch.full((1, 8), -200.0), routing)[1]
    assert weights.tolist() == [[0.0, 0.0, 0.0]]


def latent_arguments(rows: int, rope: int, heads: int, rank: int, dtype: torch.dtype) -> Latents:
    """What ``Ops.rope_and_store_latent`` gets besides the cache and its places."""
    torch.manual_seed(rows)
    q = torch.randn(rows, heads, 24 + rope).to(dtype)
    kv = torch.randn(rows, rank + rope).to(dtype)
    return (
        torch.randn(rows, heads, rank).to(dtype),
        q[..., 24:],
        torch.randn(rows, rank).to(dtype),
        kv[:, rank:],
        torch.randn(500, rope),
        torch.randint(0, 500, (rows,)),
    )


def close(result: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype) -> bool:
    """Equal up to fp32 arithmetic and, for bf16, one rounding of a value that may fall on either
    side."""
    tolerance = 2e-6 if dtype == FP32 else 2**-7
    return torch.allclose(result.double(), reference.double(), rtol=tolerance, atol=tolerance / 4)


def with_ties_and_nan(columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Logits of 12 rows, most with equal ones, some with numbers that are not finite."""
    logits = torch.randn(12, columns).to(dtype).round(decimals=1)
    logits[1] = torch.nan
    logits[2, -1] = torch.nan
    logits[3, 0] = torch.nan
    logits[4, -1] = torch.inf
    logits[5] = -torch.inf
    logits[6, :-1] = -torch.inf
    return logits
