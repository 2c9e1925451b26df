"""Rotary position embedding: frequencies from a config, and the table of cosines and sines the kernels read.

Frequencies and angles are computed in fp32 as the reference implementation (transformers) does, so that long positions agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from setpoint.core.errors import CheckpointError

DEFAULT_THETA = 10000.0


@dataclass(slots=True, frozen=True)
class RotaryEmbedding:
    """``inv_freq`` [D / 2] fp32 on the CPU: radians per position of each pair of dimensions."""

    inv_freq: torch.Tensor

    @classmethod
    def from_config(cls, config: Mapping[str, Any], head_dim: int) -> RotaryEmbedding:
        """Read rope_theta and rope_scaling (older configs) or rope_parameters (newer ones). CheckpointError if unsupported."""
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in SCALINGS:
            raise CheckpointError(f"Rope scaling {kind!r} is not supported; supported: {', '.join(SCALINGS)}.")
        if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
            raise CheckpointError("A partial_rotary_factor other than 1 is not supported.")
        theta = float(rope.get("rope_theta", config.get("rope_theta", DEFAULT_THETA)))
        inv_freq = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim)
        try:
            return cls(SCALINGS[kind](inv_freq, rope))
        except KeyError as missing:
            raise CheckpointError(f"Rope scaling {kind!r} lacks {missing} in config.json.") from None

    def table(self, num_positions: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """-> [num_positions, D]: cos in the first D / 2 columns, sin in the rest."""
        positions = torch.arange(num_positions, dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, self.inv_freq)
        return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device, dtype)


def _default(inv_freq: torch.Tensor, rope: Mapping[str, Any]) -> torch.Tensor:
    return inv_freq


def _linear(inv_freq: torch.Tensor, rope: Mapping[str, Any]) -> torch.Tensor:
    """Positions squeezed by ``factor``."""
    return inv_freq / rope["factor"]


def _banded(inv_freq: torch.Tensor, rope: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1: wavelengths longer than the original context / low_freq_factor are stretched by ``factor``, those shorter than
    the original context / high_freq_factor stay, the ones between are blended linearly in 1 / wavelength."""
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    context = rope["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inv_freq
    keep = ((context / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * inv_freq / factor + keep * inv_freq


SCALINGS = {"default": _default, "linear": _linear, "llama3": _banded}
