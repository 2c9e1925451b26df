"""The work of one kind of operation during a step: its time, and the least that it had to read and
compute."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Work:
    """Sums over the calls of a step, counted by a wrapper around the operations."""

    seconds: float = 0.0
    num_calls: int = 0
    num_bytes: int = 0
    """Bytes of weights, keys and values, or activations that must be read or written at least
    once."""
    flops: int = 0
    """Multiplications and additions of matrix products."""
    product: str = ""
    """The type of the multiplied numbers: "float32", "bfloat16", "int8", …; "" if nothing is
    multiplied."""
