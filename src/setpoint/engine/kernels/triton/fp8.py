"""Numbers as a KV cache holds them. The codes of fp8 are computed with integers: a GPU of sm_80 has
no instruction for e4m3, and so all GPUs get the same codes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MANTISSAS = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}
"""Bits of the mantissa of a type of one byte; argument of ``to_cache``."""


@triton.jit
def to_cache(x, scale, kind: tl.constexpr, MANTISSA: tl.constexpr):
    """x as type ``kind``, or for MANTISSA > 0 x / scale as codes of fp8 in bytes."""
    return nearest_codes(tl.div_rn(x.to(tl.float32), scale), MANTISSA) if MANTISSA else x.to(kind)


@triton.jit
def nearest_codes(x, MANTISSA: tl.constexpr):
    """The codes of the nearest values, of two the even one, and of the largest for all that are
    larger."""
    bias: tl.constexpr = 7 if MANTISSA == 3 else 15
    largest: tl.constexpr = 448.0 if MANTISSA == 3 else 57344.0
    dropped: tl.constexpr = 23 - MANTISSA
    size = tl.abs(x)
    size = tl.where(size > largest, largest, size)  # keeps NaN
    bits = size.to(tl.int32, bitcast=True)
    normal = (bits + ((1 << (dropped - 1)) - 1) + ((bits >> dropped) & 1)) >> dropped
    normal -= (127 - bias) << MANTISSA
    # Below the smallest normal number the steps are equal: added to a number whose last bit is
    # such a step, the size is rounded to steps, and the difference of the bits counts them.
    exponent: tl.constexpr = 24 - bias - MANTISSA
    steps = (size + 2.0**exponent).to(tl.int32, bitcast=True) - ((127 + exponent) << 23)
    code = tl.where(size < 2.0 ** (1 - bias), steps, normal)
    code = tl.where(size != size, 0x7F, code)
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


def codes(cache: torch.Tensor) -> torch.Tensor:
    """The cache as the type that a kernel stores."""
    return cache.view(torch.uint8) if cache.dtype in MANTISSAS else cache
