"""Linear layers with 8-bit weights and 8-bit activations: the definition of what is computed, and a
reference implementation in plain torch.

A weight has one scale per output channel and is rounded when it is loaded; an activation has one
scale per token and is rounded at every call: scale = the row's largest magnitude / 127, number =
value · (127 / largest) rounded to even. Their product is a sum of integers, hence the same in any
order: y = sum · (activation's scale · weight's scale) + bias, in fp32.

Before rounding, both are rotated: each run of BLOCK neighbours in K is multiplied by a Hadamard
matrix H. Because H Hᵀ = BLOCK · 1, the product does not change except for that factor, which the
weight's scale removes. An outlier, whose scale would leave few steps for the rest of its row, is
spread over its run (QuaRot, arXiv:2404.00456, rotates whole rows; a run needs additions within
registers only).
"""

from __future__ import annotations

import torch

LARGEST = 127
"""Largest rounded value; the smallest is -LARGEST."""
TINY = 1e-30
"""A row whose largest magnitude is below this counts as zero, because 127 / largest would overflow
for magnitudes not much smaller."""
MAX_K = 2**31 // LARGEST**2
"""Largest number of products whose sum fits in 32 bits."""
BLOCK = 64
"""Number of neighbours that are rotated together. If K is not a multiple of it, the largest power
of two that divides K is used."""


def block_size(k: int) -> int:
    """Number of neighbours that are rotated together in rows of ``k`` numbers."""
    return min(BLOCK, k & -k)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """fp32 [R, K] -> [R, K]: each run of ``block_size(K)`` numbers multiplied by the unnormalised
    H. The order of additions is the same on every machine."""
    h = 1
    while h < block_size(x.shape[1]):
        low, high = x.view(len(x), -1, 2, h).unbind(2)
        x = torch.stack((low + high, low - high), 2).view(x.shape)
        h *= 2
    return x


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [R, K] -> (int8 [R, K], fp32 scales [R]). A row with a NaN or an infinity becomes zeros
    with the scale NaN."""
    largest = x.abs().amax(1)
    inverse = torch.where(
        largest < TINY, 0.0, torch.full_like(largest, LARGEST).div_(largest)
    )  # 127 / tensor would round twice
    numbers = (
        torch.where(largest.isfinite()[:, None], x * inverse[:, None], 0.0).round_().to(torch.int8)
    )
    return numbers, torch.where(
        largest < TINY, 0.0, torch.where(largest.isfinite(), largest / LARGEST, torch.nan)
    )


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] -> (int8 [N, K], fp32 scales [N] that compensate for both rotations)."""
    numbers, scales = quantize_rows(rotate(weight.float()))
    return numbers, scales / block_size(weight.shape[1])


class ReferenceWeight:
    """Implements ``quant.linear_method.PackedWeight``."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._numbers, self._scales = quantize_weight(weight)
        self._bias = bias
        self.num_bytes = (
            self._numbers.nbytes + self._scales.nbytes + (0 if bias is None else bias.nbytes)
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        numbers, scales = quantize_rows(rotate(x.float()))
        sums = numbers.double() @ self._numbers.double().T  # exact
        y = sums.float() * (scales[:, None] * self._scales)
        return (y if self._bias is None else y + self._bias.float()).to(x.dtype)


class ReferenceLinear:
    """Implements ``quant.linear_method.LinearMethod``."""

    copies = True

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> ReferenceWeight:
        return ReferenceWeight(weight, bias)


def create(dtype: torch.dtype) -> ReferenceLinear:
    """The reference method, which runs everywhere."""
    return ReferenceLinear()
