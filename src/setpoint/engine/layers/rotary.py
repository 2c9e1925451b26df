"""Rotary position embedding: frequencies from a config, and the table of cosines and sines that the
kernels read.

Frequencies and angles are computed in fp32 as in the reference implementation (transformers), so
that long positions agree.

A cached key keeps the rotation with which it was stored, whichever sequence reads it later. So one
table serves every position of every sequence while the engine runs: a variant whose frequencies
depend on the sequence's length uses the configured context length instead (docs/decisions/0008).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from setpoint.core.errors import CheckpointError

DEFAULT_THETA = 10000.0
FP32 = torch.finfo(torch.float32)
MAX_POSITIONS = (1 << 31) - 1
"""Largest accepted number of positions, which are 32-bit integers."""
MAX_MSCALE = 1000.0
"""Largest accepted weight of an attention factor. Published models have at most 1."""
ALIASES = {"su": "longrope"}
"""Older names of rope types -> the current names."""


@dataclass(slots=True, frozen=True)
class RotaryEmbedding:
    """The rotations that a config declares, validated."""

    kind: str
    """The rope type, a key of SCALINGS."""
    dim: int
    """Number of rotated dimensions of a head, which are its first ones; even."""
    theta: float
    max_positions: int
    """max_position_embeddings."""
    original: int
    """Number of positions before the context was stretched."""
    section: Mapping[str, Any]
    """The config's rope_parameters or rope_scaling, with the other keys about rotations."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], head_dim: int) -> RotaryEmbedding:
        """Read rope_theta and rope_scaling (older configs) or rope_parameters (newer ones). Raises
        CheckpointError if the scaling is unsupported."""
        section = config.get("rope_scaling") or config.get("rope_parameters") or {}
        kind = section.get("rope_type") or section.get("type") or "default"
        kind = ALIASES.get(kind, kind)
        if kind not in SCALINGS:
            raise CheckpointError(
                f"Rope scaling {kind!r} is not supported; supported: {', '.join(SCALINGS)}."
            )
        if any(isinstance(value, Mapping) for value in section.values()):
            raise CheckpointError(
                "Rope parameters that differ between kinds of layers are not supported for this"
                " architecture."
            )
        section = {
            **{key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")},
            **section,
        }
        max_positions = config["max_position_embeddings"]
        # Phi-3 keeps the original length outside the section, and transformers gives that value
        # precedence.
        original = (
            config.get("original_max_position_embeddings")
            or section.get("original_max_position_embeddings")
            or max_positions
        )
        given = cls(kind, head_dim, DEFAULT_THETA, max_positions, original, section)
        dim = int(head_dim * given.number("partial_rotary_factor", 1.0))
        rotary = replace(given, dim=dim, theta=given.number("rope_theta", DEFAULT_THETA))
        if dim % 2 or not 0 < dim <= head_dim:
            rotary.fail(
                f"'partial_rotary_factor' must leave an even part of {head_dim} dimensions, not"
                f" {dim}"
            )
        if type(original) is not int or not 2 <= original <= MAX_POSITIONS:
            rotary.fail(
                "'original_max_position_embeddings' must be an integer from 2 to"
                f" {MAX_POSITIONS}, not {original!r:.60}"
            )
        if rotary.theta <= 1:
            rotary.fail(f"'rope_theta' must be above 1, not {rotary.theta}")
        for context_len in (
            original,
            original + 1,
        ):  # finds missing keys now, not after the weights are loaded
            rotary.frequencies(context_len)
        return rotary

    def frequencies(self, context_len: int) -> tuple[torch.Tensor, float]:
        """(radians per position for each pair of dimensions [dim / 2] fp32, factor on every cosine
        and sine)."""
        return SCALINGS[self.kind](self, context_len)

    def table(self, context_len: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """[context_len, dim]: cosines in the first dim / 2 columns, sines in the others."""
        inv_freq, factor = self.frequencies(context_len)
        angles = torch.outer(torch.arange(context_len, dtype=torch.float32, device="cpu"), inv_freq)
        return torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1).to(device, dtype)

    def positions_per_radian(self, theta: float) -> torch.Tensor:
        """theta ** (2 i / dim), i = 0 .. dim / 2 - 1, fp32 on the CPU."""
        return theta ** (
            torch.arange(0, self.dim, 2, dtype=torch.int64, device="cpu").float() / self.dim
        )

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number of the section, which fp32 can hold; null counts as absent."""
        value = self.section.get(key)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"Rope scaling {self.kind!r} lacks {key!r} in config.json.")
        if not _is_positive(value):
            self.fail(f"{key!r} must be a positive number in the range of fp32, not {value!r:.60}")
        return float(value)

    def mscale(self, key: str) -> float | None:
        """``mscale`` or ``mscale_all_dim``, the weights of YaRN's attention factor; None if it is
        absent or null."""
        if self.section.get(key) is None:
            return None
        weight = self.number(key)
        if weight > MAX_MSCALE:
            self.fail(f"{key!r} is {weight}; the largest supported value is {MAX_MSCALE:g}")
        return weight

    def fail(self, problem: str) -> NoReturn:
        raise CheckpointError(f"Rope scaling {self.kind!r} in config.json: {problem}.")


def _is_positive(value: object) -> bool:
    """Whether the value is a number above zero that fp32 can hold."""
    return type(value) in (int, float) and FP32.tiny <= value <= FP32.max


def _default(rope: RotaryEmbedding, context_len: int) -> tuple[torch.Tensor, float]:
    return 1.0 / rope.positions_per_radian(rope.theta), 1.0


def _linear(rope: RotaryEmbedding, context_len: int) -> tuple[torch.Tensor, float]:
    """Linear scaling: positions are divided by ``factor``."""
    return 1.0 / rope.positions_per_radian(rope.theta) / rope.number("factor"), 1.0


def _dynamic(rope: RotaryEmbedding, context_len: int) -> tuple[torch.Tensor, float]:
    """NTK-aware scaling: theta is raised so that over ``context_len`` positions the slowest pair
    turns no further than it did in training."""
    if rope.dim < 4:
        rope.fail("it needs at least 4 rotated dimensions")
    factor, exponent = rope.number("factor"), rope.dim / (rope.dim - 2)
    stretch = factor * max(context_len, rope.max_positions) / rope.max_positions - (factor - 1)
    return 1.0 / rope.positions_per_radian(rope.theta * stretch**exponent), 1.0


def _banded(rope: RotaryEmbedding, context_len: int) -> tuple[torch.Tensor, float]:
    """Llama 3.1's scaling: wavelengths longer than the original context / low_freq_factor are
    stretched by ``factor``, those shorter than the original context / high_freq_factor stay as they
    are, and between the two the frequencies are interpolated linearly in 1 / wavelength."""
    factor, low, high = (
        rope.number("factor"),
        rope.number("low_freq_factor"),
        rope.number("high_freq_factor"),
    )
    if not low < high:
        rope.fail("'low_freq_factor' must be below 'high_freq_factor'")
    inv_freq = 1.0 / rope.positions_per_radian(rope.theta)
    wavelength = 2 * math.pi / inv_freq
    keep = ((rope.original / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * inv_freq / factor + keep * inv_freq, 1.0


def _yarn(rope: RotaryEmbedding, context_len: int) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv 2309.00071): pairs that turn more than beta_fast times over the original context
    stay as they are, those that turn fewer than beta_slow times are stretched by ``factor``, and a
    linear ramp over the pairs lies between; the returned factor sharpens attention."""
    factor = rope.number("factor")

    def pair_that_turns(times: float) -> float:
        return (
            rope.dim * math.log(rope.original / (times * 2 * math.pi)) / (2 * math.log(rope.theta))
        )

    first, last = (
        pair_that_turns(rope.number("beta_fast", 32.0)),
        pair_that_turns(rope.number("beta_slow", 1.0)),
    )
    if rope.section.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.dim - 1)
    width = last - first or 0.001
    keep = 1 - (
        (torch.arange(rope.dim // 2, dtype=torch.float32, device="cpu") - first) / width
    ).clamp(0, 1)
    spans = rope.positions_per_radian(rope.theta)
    inv_freq = 1.0 / (factor * spans) * (1 - keep) + 1.0 / spans * keep
    mscale, mscale_all_dim = rope.mscale("mscale"), rope.mscale("mscale_all_dim")
    if rope.section.get("attention_factor") is not None:
        return inv_freq, rope.number("attention_factor")

    def attention_factor(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if mscale is None or mscale_all_dim is None:
        return inv_freq, attention_factor(1.0)
    return inv_freq, attention_factor(mscale) / attention_factor(mscale_all_dim)


def _longrope(rope: RotaryEmbedding, context_len: int) -> tuple[torch.Tensor, float]:
    """LongRoPE (arXiv 2402.13753): a stretch factor for every pair, from one list for contexts up
    to the original length, and from another for longer ones."""
    key = "short_factor" if context_len <= rope.original else "long_factor"
    factors = rope.section.get(key)
    if factors is None:
        raise CheckpointError(f"Rope scaling {rope.kind!r} lacks {key!r} in config.json.")
    is_numbers = isinstance(factors, list) and all(_is_positive(number) for number in factors)
    if not is_numbers or len(factors) != rope.dim // 2:
        rope.fail(
            f"{key!r} must be a list of {rope.dim // 2} positive numbers in the range of fp32"
        )
    inv_freq = 1.0 / (
        torch.tensor(factors, dtype=torch.float32, device="cpu")
        * rope.positions_per_radian(rope.theta)
    )
    stretch = rope.number("factor", rope.max_positions / rope.original)
    inferred = math.sqrt(1 + math.log(stretch) / math.log(rope.original)) if stretch > 1 else 1.0
    return inv_freq, rope.number("attention_factor", inferred)


SCALINGS: dict[str, Callable[[RotaryEmbedding, int], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _banded,
    "longrope": _longrope,
}
"""Rope type -> function that computes the frequencies and the attention factor for a context
length."""
