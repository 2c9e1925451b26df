"""Reads from a GGUF file how positions are rotated.

Works on a parsed header and, of the weights, on the factors of frequencies. Knows no architecture.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from setpoint.checkpoint.gguf.checked_numbers import positive, shortest
from setpoint.checkpoint.gguf.header import GGUFFile
from setpoint.core.errors import CheckpointError
from setpoint.core.excerpt import quoted

ROPE_FACTORS = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The rope parameters of every Llama 3.1–3.3 release. A GGUF file stores only the factors that
follow from them, so those factors are checked against these parameters."""
YARN_KEYS = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
"""config.json's key -> GGUF's, below ``rope.scaling``."""


def rope_base(file: GGUFFile, key: str, default: float = 10000.0) -> float:
    """The base of the frequencies; ``default`` if the file has none."""
    return positive(file, key) if file.get(key, float) else default


def rope_scaling(file: GGUFFile, arch: str, dim: int) -> dict[str, Any] | None:
    """config.json's rope_scaling; dim: the rotated numbers of a head. Raises CheckpointError for a
    kind that is not supported."""
    kind = file.get(f"{arch}.rope.scaling.type", str) or "none"
    if LONG in file.tensors or SHORT in file.tensors:
        return _longrope(file, arch, dim)
    if ROPE_FACTORS in file.tensors:
        if kind != "none":
            raise CheckpointError(
                f"{file.path}: rope scaling {quoted(kind)} together with the factors"
                f" {ROPE_FACTORS!r} is not supported."
            )
        return _by_factors(file, arch, dim)
    if kind == "none":
        return None
    if kind == "linear":
        factor = _factor(file, arch)
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
    if kind == "yarn":
        return _yarn(file, arch)
    raise CheckpointError(
        f"{file.path}: rope scaling {quoted(kind)} is not supported (linear, yarn, longrope and"
        " factors of frequencies are)."
    )


def original_context(file: GGUFFile, arch: str) -> int:
    """The number of positions before the context was stretched."""
    return file.get(f"{arch}.rope.scaling.original_context_length", int) or file.require(
        f"{arch}.context_length", int
    )


def _factor(file: GGUFFile, arch: str) -> float:
    for key in ("rope.scaling.factor", "rope.scale_linear"):
        if file.get(f"{arch}.{key}", float):
            return positive(file, f"{arch}.{key}")
    return 1.0


def _yarn(file: GGUFFile, arch: str) -> dict[str, Any] | None:
    factor = _factor(file, arch)
    for key in ("attn_factor", "yarn_ext_factor"):
        if (value := file.get(f"{arch}.rope.scaling.{key}", float)) not in (None, 1.0):
            raise CheckpointError(
                f"{file.path}: {arch}.rope.scaling.{key} = {value} is not supported."
            )
    if factor == 1.0:
        return None
    found: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original_context(file, arch),
    }
    for key, old in {**YARN_KEYS, "attention_factor": "yarn_attn_factor"}.items():
        if file.get(f"{arch}.rope.scaling.{old}", float) is not None:
            found[key] = positive(file, f"{arch}.rope.scaling.{old}")
    return found


def _longrope(file: GGUFFile, arch: str, dim: int) -> dict[str, Any]:
    """LongRoPE's two lists. The factor of attention is written only if it is not the one that
    follows from the lengths."""
    found: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": _factors(file, SHORT, dim),
        "long_factor": _factors(file, LONG, dim),
    }
    key = f"{arch}.rope.scaling.attn_factor"
    if file.get(key, float):
        given, original = positive(file, key), original_context(file, arch)
        stretch = file.require(f"{arch}.context_length", int) / original
        follows = 1.0
        if stretch > 1 and original > 1:
            follows = float(np.sqrt(1 + np.log(stretch) / np.log(original)))
        if not np.isclose(given, follows, rtol=1e-5):
            found["attention_factor"] = given
    return found


def _by_factors(file: GGUFFile, arch: str, dim: int) -> dict[str, Any]:
    """Llama 3's rope parameters if they give these factors; any other factors as LongRoPE's with
    one list for all lengths."""
    factors = _factors(file, ROPE_FACTORS, dim)
    llama3 = {"rope_type": "llama3", "factor": max(factors), **LLAMA3_ROPE}
    theta = rope_base(file, f"{arch}.rope.freq_base")
    if np.allclose(factors, _llama3_factors(llama3, theta, dim), rtol=1e-3):
        return llama3
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
    }


def _llama3_factors(scaling: dict[str, Any], theta: float, dim: int) -> npt.NDArray[np.float64]:
    """The divisor of each frequency. Frequencies that turn more than ``high`` times over the
    original context are kept; those that turn fewer than ``low`` times are divided by ``factor``;
    those in between are interpolated by the number of turns."""
    turns = scaling["original_max_position_embeddings"] / (
        2 * np.pi * theta ** (np.arange(dim // 2) * 2 / dim)
    )
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    factors: npt.NDArray[np.float64] = 1.0 / ((1.0 - blend) / scaling["factor"] + blend)
    return factors


def _factors(file: GGUFFile, name: str, dim: int) -> list[float]:
    tensor = file.tensors.get(name)
    if tensor is None:
        raise CheckpointError(f"{file.path}: tensor {name!r} is missing.")
    if tensor.kind.name != "F32" or tensor.shape != (dim // 2,):
        raise CheckpointError(
            f"{file.path}: tensor {name!r} is {tensor.kind.name} {tensor.shape}, not F32"
            f" ({dim // 2},)."
        )
    values = file.rows(tensor).view("<f4").ravel()
    if not (np.isfinite(values) & (values > 0)).all():
        raise CheckpointError(
            f"{file.path}: tensor {name!r} has values that are no numbers above zero; the file is"
            " damaged."
        )
    return [shortest(float(value)) for value in values]
