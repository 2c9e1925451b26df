"""Packs the numbers of a vector into the types that vLLM's clients ask for, in little-endian
order."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from setpoint.core.result import Floats

Dtype = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]


Numbers = np.ndarray[Any, np.dtype[Any]]


def packed_vector(vector: Floats, dtype: Dtype) -> Numbers:
    """The numbers rounded to the nearest values of the type, ties to even. numpy has no 8-bit
    floats and no bfloat16, so these are returned as unsigned integers of the same size."""
    match dtype:
        case "float32":
            return vector.astype("<f4", copy=False)
        case "float16":
            with np.errstate(over="ignore"):
                return vector.astype("<f2")
        case "bfloat16":
            bits = vector.astype("<f4").view("<u4")
            rounded: Numbers = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
            return rounded
        case "fp8_e4m3":
            return _nearest(vector, _E4M3, beyond=0x7E)
        case "fp8_e5m2":
            return _nearest(vector, _E5M2, beyond=0x7C)


def _finite(exponent_bits: int, mantissa_bits: int, count: int) -> Numbers:
    """The first ``count`` numbers of an 8-bit type from 0 on, whose codes are 0, 1, 2, …"""
    codes = np.arange(count)
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits) + (exponent > 0)
    bias = (1 << (exponent_bits - 1)) - 1
    numbers: Numbers = fraction * 2.0 ** (np.maximum(exponent, 1) - bias)
    return numbers


_E4M3 = _finite(4, 3, 0x7F)
"""Code 0x7F is not a number; there is no infinity, so torch makes 448 of larger numbers."""
_E5M2 = _finite(5, 2, 0x7C)
"""Code 0x7C is infinity."""


def _nearest(vector: Floats, numbers: Numbers, *, beyond: int) -> Numbers:
    """The codes of the nearest numbers. beyond: the code for values that are too large for the
    type."""
    size = np.abs(vector.astype(np.float64))
    past_end = 2 * numbers[-1] - numbers[-2]
    ends = np.append(numbers, past_end)
    middles = (ends[:-1] + ends[1:]) / 2
    codes = np.searchsorted(middles, size, side="left")
    is_tie = middles[np.minimum(codes, len(middles) - 1)] == size
    codes = np.where(is_tie & (codes % 2 == 1), codes + 1, codes)
    codes = np.where(codes >= len(numbers), beyond, codes)
    return (codes | (np.signbit(vector) << 7)).astype(np.uint8)
