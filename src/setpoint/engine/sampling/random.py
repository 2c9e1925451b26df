"""The counter-based generator: computes a uniform number from nothing but (seed, position).

The same pair gives the same number in every batch, on every device and after a resumption, because
the generator has no state. The mixing function is the finaliser of SplitMix64 (Steele, Lea, Flood
2014), in int64 arithmetic that wraps.
"""

from __future__ import annotations

import torch


def _as_int64(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit constant."""
    return value - (1 << 64) if value >> 63 else value


GOLDEN, MIX_1, MIX_2 = (
    _as_int64(0x9E3779B97F4A7C15),
    _as_int64(0xBF58476D1CE4E5B9),
    _as_int64(0x94D049BB133111EB),
)


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """seeds, positions [S] int64 -> [S] float64 in [0, 1), 53 random bits each."""
    return _shift(_mix(_mix(seeds + GOLDEN) + positions * GOLDEN), 11).double() * 2.0**-53


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)) * MIX_1
    x = (x ^ _shift(x, 27)) * MIX_2
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift; torch's own copies the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
