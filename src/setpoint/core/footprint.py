"""The memory that a loaded model takes besides its KV pool and its slot table, as its runner
measured it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Footprint:
    """All sizes are in bytes."""

    weights: int
    rotations: int
    """Tables of cosines and sines."""
    captured: int
    """Tensors that captured steps keep."""
    step_tokens: int
    """Number of tokens in the step that ``activations`` describes."""
    activations: int | None
    """Largest total size of that step's temporaries at any time, without logits; it grows in
    proportion to the number of tokens. None if it cannot be found without running such a step."""
