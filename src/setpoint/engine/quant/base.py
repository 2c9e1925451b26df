"""The seam of linear layers: a method owns a weight after loading, in whatever layout it multiplies fastest.

Works on one weight matrix at a time. Knows nothing of which layer it belongs to.
"""

from __future__ import annotations

from typing import Protocol

import torch

from setpoint.core.errors import ConfigError
from setpoint.engine.kernels.ops import KernelsUnavailable
from setpoint.engine.kernels.registry import resolve


class PackedWeight(Protocol):
    """One weight [N, K] in the method's own layout."""

    num_bytes: int
    """Memory it holds, bias included."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K], contiguous -> x · weightᵀ + bias, [T, N]."""
        ...


class LinearMethod(Protocol):
    name: str

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedWeight:
        """Take over a loaded weight [N, K] and its bias [N]. The caller drops its references, so that nothing is held twice."""
        ...


METHODS = {
    "plain": "setpoint.engine.quant.plain:create",
    "packed": "setpoint.engine.quant.packed:create",
}
"""Name -> factory ``create(device_type, dtype) -> LinearMethod``; it raises KernelsUnavailable with the reason."""

PREFERENCE = {"cpu": ("packed", "plain"), "cuda": ("plain",)}
"""Device type -> names, best first; the last one runs everywhere."""


def choose_linear(device_type: str, dtype: torch.dtype) -> tuple[LinearMethod, str]:
    """The best method that runs here, and why not a better one (empty when the first choice runs)."""
    reasons = []
    for name in PREFERENCE[device_type]:
        try:
            method: LinearMethod = resolve(METHODS[name])(device_type, dtype)
        except KernelsUnavailable as reason:
            reasons.append(f"{name}: {reason}")
        else:
            return method, "; ".join(reasons)
    raise ConfigError(f"No linear method runs on {device_type}: {'; '.join(reasons)}.")
