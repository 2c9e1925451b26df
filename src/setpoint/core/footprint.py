"""A loaded model's memory without its KV pool and its slot table, as measured by its runner."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(slots=True, frozen=True)
class Footprint:
    """All sizes are in bytes."""

    weights: int
    rotations: int
    """Tables of cosines and sines."""
    captured: int | None
    """Tensors that captured steps keep; None on a device whose graphs are captured only once the
    pool has its size."""
    step_tokens: int
    """Number of tokens in the step that ``activations`` describes."""
    activations: int | None
    """Largest total size of that step's temporaries at any time, without logits; it is proportional
    to the number of tokens. None if it could not be measured."""

    def of_ranks(self, size: int, weights: int) -> Footprint:
        """The footprint of ``size`` ranks in one memory, if each of them has what this one has,
        apart from its part of the weights. weights: those of all ranks together."""
        activations = None if self.activations is None else self.activations * size
        return replace(
            self,
            weights=weights,
            rotations=self.rotations * size,
            captured=None if self.captured is None else self.captured * size,
            activations=activations,
        )
