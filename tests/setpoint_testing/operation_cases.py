"""Sizes at which implementations of the operations are compared with the reference, and what counts
as equal."""

from __future__ import annotations

import itertools

import torch

BF16, FP32 = torch.bfloat16, torch.float32
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
