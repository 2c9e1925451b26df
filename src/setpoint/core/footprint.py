"""What a loaded model takes besides its KV pool and its slot table, as its runner measured it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Footprint:
    """In bytes."""

    weights: int
    rotations: int
    """Tables of cosines and sines."""
    captured: int
    """Tensors that captured steps keep."""
    step_tokens: int
    """Of the step that the next field is about."""
    activations: int | None
    """Most that its temporaries take at a time, logits excluded; they grow in proportion to its
    tokens. None where this cannot be found out without running such a step."""
