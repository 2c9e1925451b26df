"""Maps a GGUF file's metadata to config.json.

Works on a parsed header; of the weights it reads only the rope factors. It knows nothing of
quantisation or of the files on disk.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from setpoint.checkpoint.configfile import MAX_POSITIONS
from setpoint.checkpoint.gguf_architectures import Decoder, Experts
from setpoint.checkpoint.gguf_file import GGUFFile, GGUFTensor
from setpoint.core.errors import CheckpointError
from setpoint.core.excerpt import excerpt

ROPE_FACTORS = "rope_freqs.weight"
LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The rope parameters of every Llama 3.1–3.3 release. A GGUF file stores only the factors that
follow from them, so those factors are checked against these parameters."""

NEUTRAL: tuple[tuple[str, tuple[float, ...]], ...] = (
    ("attention.sliding_window", (0,)),
    ("attention.clamp_kqv", (0.0,)),
    ("attention.scale", (0.0,)),
    ("logit_scale", (0.0,)),
    ("embedding_scale", (0.0,)),
    ("residual_scale", (0.0,)),
    ("leading_dense_block_count", (0,)),
    ("nextn_predict_layers", (0,)),
    ("expert_weights_scale", (0.0, 1.0)),
    ("expert_gating_func", (0, 1)),  # softmax
    ("expert_group_count", (0, 1)),
)
"""(key that changes the computation, values that mean "not used"). Any other value is refused."""


def read_config(file: GGUFFile, decoder: Decoder) -> dict[str, Any]:
    """The part of config.json that describes the model. The caller adds the token ids and the
    dtype. Raises CheckpointError for a value that is missing or not supported."""
    arch = file.require("general.architecture", str)
    neutral = [*NEUTRAL, *([] if decoder.experts else [("expert_count", (0,))])]
    for key, values in neutral:
        value = file.metadata.get(f"{arch}.{key}", values[0])
        if value not in values:
            raise CheckpointError(
                f"{file.path}: {arch}.{key} = {excerpt(str(value))} is not supported."
            )
    hidden = file.require(f"{arch}.embedding_length", int)
    num_heads = file.require(f"{arch}.attention.head_count", int)
    num_kv_heads = file.get(f"{arch}.attention.head_count_kv", int) or num_heads
    if num_heads < 1 or num_heads % num_kv_heads:
        raise CheckpointError(
            f"{file.path}: {num_heads} attention heads cannot share {num_kv_heads} key-value heads."
        )
    head_dim = file.get(f"{arch}.attention.key_length", int) or hidden // num_heads
    for key in ("attention.value_length", "rope.dimension_count"):
        if (file.get(f"{arch}.{key}", int) or head_dim) != head_dim:
            raise CheckpointError(
                f"{file.path}: {arch}.{key} differs from the head size {head_dim}; that is not"
                " supported."
            )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(
            f"{file.path}: tensor 'token_embd.weight' is missing, so the model is incomplete."
        )
    return {
        "architectures": [decoder.architecture],
        "model_type": decoder.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": file.require(f"{arch}.feed_forward_length", int),
        "num_hidden_layers": file.require(f"{arch}.block_count", int),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": _context_len(file, f"{arch}.context_length"),
        "rms_norm_eps": _positive(file, f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_theta": _rope_base(file, arch),
        "rope_scaling": _rope_scaling(file, arch, head_dim),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **(_of_experts(file, arch, decoder.experts) if decoder.experts else {}),
    }


def _of_experts(file: GGUFFile, arch: str, experts: Experts) -> dict[str, Any]:
    number = file.require(f"{arch}.expert_count", int)
    chosen = file.require(f"{arch}.expert_used_count", int)
    if not 1 <= chosen <= number:
        raise CheckpointError(
            f"{file.path}: {arch}.expert_used_count is {chosen}, but there are {number} experts."
        )
    normalise = file.get(f"{arch}.expert_weights_norm", bool)
    if normalise not in (None, experts.normalise):
        raise CheckpointError(
            f"{file.path}: {arch}.expert_weights_norm = {normalise} is not supported."
        )
    found = {
        experts.num_key: number,
        "num_experts_per_tok": chosen,
        experts.size_key: file.require(f"{arch}.{experts.sized_by}", int),
        "norm_topk_prob": experts.normalise,
    }
    if experts.is_shared:
        found["shared_expert_intermediate_size"] = file.require(
            f"{arch}.expert_shared_feed_forward_length", int
        )
    return found


def _rope_scaling(file: GGUFFile, arch: str, head_dim: int) -> dict[str, Any] | None:
    kind = file.get(f"{arch}.rope.scaling.type", str) or "none"
    factor = (
        file.get(f"{arch}.rope.scaling.factor", float)
        or file.get(f"{arch}.rope.scale_linear", float)
        or 1.0
    )
    tensor = file.tensors.get(ROPE_FACTORS)
    if kind == "none" and tensor is not None:
        return _llama3_scaling(file, arch, tensor, head_dim)
    if kind == "linear" and tensor is None:
        return {"rope_type": "linear", "factor": _shortest(factor)} if factor != 1.0 else None
    if kind == "none":
        return None
    raise CheckpointError(
        f"{file.path}: rope scaling {excerpt(kind)!r} is not supported for GGUF files (none,"
        " linear and Llama 3 are)."
    )


def _llama3_scaling(file: GGUFFile, arch: str, tensor: GGUFTensor, head_dim: int) -> dict[str, Any]:
    """Llama 3's rope parameters, recovered from its factors per frequency. Raises CheckpointError
    if they do not give these factors."""
    if tensor.kind.name != "F32" or tensor.shape != (head_dim // 2,):
        raise CheckpointError(
            f"{file.path}: tensor {ROPE_FACTORS!r} is {tensor.kind.name} {tensor.shape}, not F32"
            f" ({head_dim // 2},)."
        )
    factors = file.rows(tensor).view("<f4").ravel().astype(np.float64)
    scaling: dict[str, Any] = {
        "rope_type": "llama3",
        "factor": _shortest(float(factors.max())),
        **LLAMA3_ROPE,
    }
    theta = _rope_base(file, arch)
    # Frequencies that turn more than `high` times over the original context are kept; those that
    # turn fewer than `low` times are divided by `factor`; those in between are interpolated by the
    # number of turns.
    turns = LLAMA3_ROPE["original_max_position_embeddings"] / (
        2 * np.pi * theta ** (np.arange(head_dim // 2) * 2 / head_dim)
    )
    low, high = LLAMA3_ROPE["low_freq_factor"], LLAMA3_ROPE["high_freq_factor"]
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    if not np.allclose(factors, 1.0 / ((1.0 - blend) / scaling["factor"] + blend), rtol=1e-3):
        raise CheckpointError(
            f"{file.path}: the rope factors in {ROPE_FACTORS!r} are not Llama 3's; no other set is"
            " supported."
        )
    return scaling


def _context_len(file: GGUFFile, key: str) -> int:
    found = file.require(key, int)
    if not 1 <= found <= MAX_POSITIONS:
        raise CheckpointError(
            f"{file.path}: {key} is {found}; it must be from 1 to {MAX_POSITIONS}."
        )
    return found


def _rope_base(file: GGUFFile, arch: str) -> float:
    key = f"{arch}.rope.freq_base"
    return _positive(file, key) if file.get(key, float) else 10000.0


def _positive(file: GGUFFile, key: str) -> float:
    found = file.require(key, float)
    if not 0 < found < np.inf:
        raise CheckpointError(f"{file.path}: {key} is {found}; it must be a number above zero.")
    return _shortest(found)


def _shortest(value: float) -> float:
    """The number with the shortest decimal that gives the same float32: 1e-05, not
    9.999999747378752e-06."""
    return float(str(np.float32(value)))
