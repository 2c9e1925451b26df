"""What one kind of operation did during a step: its time, and the least that it had to read and
compute."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Work:
    """Summed over the calls of a step by whoever stands between a runner and its operations."""

    seconds: float = 0.0
    num_calls: int = 0
    num_bytes: int = 0
    """Weights, keys and values, or activations that have to pass once."""
    flops: int = 0
    """Multiplications and additions of matrix products."""
    product: str = ""
    """The type that is multiplied: "float32", "bfloat16", "int8", …; "" where nothing is."""
