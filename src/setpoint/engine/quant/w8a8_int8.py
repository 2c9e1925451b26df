"""Linear layers of 8-bit weights and 8-bit activations: what is computed, and the reference that computes it in plain torch.

A weight has one scale per output channel and is rounded when it is loaded, an activation one per token and is rounded at every call:
scale = the row's largest magnitude / 127, number = value · (127 / largest) rounded to even. Their product is a sum of integers, hence
the same in any order: y = sum · (activation's scale · weight's scale) + bias, in fp32.
"""

from __future__ import annotations

import torch

LARGEST = 127
"""Numbers go from -LARGEST to LARGEST."""
TINY = 1e-30
"""A row whose largest magnitude is below it counts as zero: 127 / largest would not be finite much further down."""
MAX_K = 2**31 // LARGEST**2
"""Products that a 32-bit sum holds."""


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[R, K] -> int8 [R, K] and fp32 scales [R]. A row with a NaN or an infinity is zero with the scale NaN."""
    wide = x.float()
    largest = wide.abs().amax(1)
    inverse = torch.where(largest < TINY, 0.0, torch.full_like(largest, LARGEST).div_(largest))  # 127 / tensor would round twice
    numbers = torch.where(largest.isfinite()[:, None], wide * inverse[:, None], 0.0).round_().to(torch.int8)
    return numbers, torch.where(largest < TINY, 0.0, torch.where(largest.isfinite(), largest / LARGEST, torch.nan))


class ReferenceWeight:
    """Implements ``quant.base.PackedWeight``."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._numbers, self._scales = quantize_rows(weight)
        self._bias = bias
        self.num_bytes = self._numbers.nbytes + self._scales.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        numbers, scales = quantize_rows(x)
        sums = numbers.double() @ self._numbers.double().T  # exact
        y = sums.float() * (scales[:, None] * self._scales)
        return (y if self._bias is None else y + self._bias.float()).to(x.dtype)


class ReferenceLinear:
    """Implements ``quant.base.LinearMethod``."""

    copies = True

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> ReferenceWeight:
        return ReferenceWeight(weight, bias)


def create(dtype: torch.dtype) -> ReferenceLinear:
    """Runs everywhere."""
    return ReferenceLinear()
