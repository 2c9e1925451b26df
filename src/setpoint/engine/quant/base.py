"""The seam of linear layers: a method owns a weight after loading, in whatever layout it multiplies fastest.

Works on one weight matrix at a time. Knows nothing of which layer it belongs to.
"""

from __future__ import annotations

from typing import Protocol

import torch

from setpoint.engine.kernels.registry import Choice, choose


class PackedWeight(Protocol):
    """One weight [N, K] and its bias in the method's own layout."""

    num_bytes: int
    """Memory it holds, bias included."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K], contiguous -> x · weightᵀ + bias, [T, N] in x's dtype."""
        ...


class LinearMethod(Protocol):
    copies: bool
    """True if ``pack`` makes a new layout: a weight shared with an embedding then costs its bytes twice."""

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedWeight:
        """Take a loaded weight [N, K] and its bias [N]. The caller drops its own references."""
        ...


METHODS = {
    "plain": "setpoint.engine.quant.plain:create",
    "packed": "setpoint.engine.quant.packed:create",
    "cpu": "setpoint.engine.quant.cpu:create",
}
"""Name -> factory ``create(dtype) -> LinearMethod``; it raises KernelsUnavailable with the reason."""

PREFERENCE = {"cpu": ("cpu", "packed", "plain"), "cuda": ("plain",)}
"""Device type -> names, best first; the last one runs everywhere."""


def choose_linear(device: torch.device, dtype: torch.dtype) -> Choice[LinearMethod]:
    """The best method for this device and dtype."""
    return choose(METHODS, PREFERENCE[device.type], dtype)
