"""Maps GGUF's "llama" architecture to a Hugging Face folder: metadata keys to config keys, and
tensors to tensors.

Works on a parsed header; of the weights it reads only the rope factors. It knows nothing of
quantisation or of the files on disk. To support another architecture, write a module like this one
and add a line to ``gguf_convert.ARCHITECTURES``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from setpoint.checkpoint.gguf_file import GGUFFile, GGUFTensor
from setpoint.core.errors import CheckpointError

ROPE_FACTORS = "rope_freqs.weight"
LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The rope parameters of every Llama 3.1–3.3 release. A GGUF file stores only the factors that
follow from them, so those factors are checked against these parameters."""

NEUTRAL = (
    ("expert_count", 0),
    ("attention.sliding_window", 0),
    ("attention.clamp_kqv", 0.0),
    ("attention.scale", 0.0),
    ("logit_scale", 0.0),
    ("embedding_scale", 0.0),
    ("residual_scale", 0.0),
)
"""(key that changes the computation, value that means "not used"). Any other value is refused."""


RowOrder = npt.NDArray[np.intp]


@dataclass(slots=True, frozen=True)
class Target:
    """One tensor of the new checkpoint, and the source of its rows."""

    name: str
    source: GGUFTensor
    row_order: RowOrder | None = None
    """Row i of the result is row ``row_order[i]`` of the source; None keeps the order."""


def read_config(file: GGUFFile) -> dict[str, Any]:
    """The part of config.json that describes the model. The caller adds the token ids and the
    dtype."""
    arch = file.require("general.architecture", str)
    for key, neutral in NEUTRAL:
        value = file.metadata.get(f"{arch}.{key}", neutral)
        if value != neutral:
            raise CheckpointError(f"{file.path}: {arch}.{key} = {value} is not supported.")
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
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": file.require(f"{arch}.feed_forward_length", int),
        "num_hidden_layers": file.require(f"{arch}.block_count", int),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": file.require(f"{arch}.context_length", int),
        "rms_norm_eps": _shortest(file.require(f"{arch}.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _shortest(file.get(f"{arch}.rope.freq_base", float) or 10000.0),
        "rope_scaling": _rope_scaling(file, arch, head_dim),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }


def targets(file: GGUFFile, config: dict[str, Any]) -> list[Target]:
    """All tensors of the new checkpoint. Raises CheckpointError if one is missing or has a wrong
    shape, or if the file has a tensor that the model does not use."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_rows, kv_rows = (
        config["num_attention_heads"] * head_dim,
        config["num_key_value_heads"] * head_dim,
    )
    block = (
        ("attn_norm", "input_layernorm", (hidden,), None),
        (
            "attn_q",
            "self_attn.q_proj",
            (q_rows, hidden),
            _undo_permutation(config["num_attention_heads"], head_dim),
        ),
        (
            "attn_k",
            "self_attn.k_proj",
            (kv_rows, hidden),
            _undo_permutation(config["num_key_value_heads"], head_dim),
        ),
        ("attn_v", "self_attn.v_proj", (kv_rows, hidden), None),
        ("attn_output", "self_attn.o_proj", (hidden, q_rows), None),
        ("ffn_norm", "post_attention_layernorm", (hidden,), None),
        ("ffn_gate", "mlp.gate_proj", (inner, hidden), None),
        ("ffn_up", "mlp.up_proj", (inner, hidden), None),
        ("ffn_down", "mlp.down_proj", (hidden, inner), None),
    )
    wanted: list[tuple[str, str, tuple[int, ...], RowOrder | None]] = []
    wanted.append(
        ("token_embd.weight", "model.embed_tokens.weight", (config["vocab_size"], hidden), None)
    )
    for layer in range(config["num_hidden_layers"]):
        wanted += [
            (f"blk.{layer}.{old}.weight", f"model.layers.{layer}.{new}.weight", shape, order)
            for old, new, shape, order in block
        ]
    wanted.append(("output_norm.weight", "model.norm.weight", (hidden,), None))
    if not config["tie_word_embeddings"]:
        wanted.append(("output.weight", "lm_head.weight", (config["vocab_size"], hidden), None))

    left = dict(file.tensors)
    left.pop(ROPE_FACTORS, None)
    found = []
    for old, new, shape, order in wanted:
        tensor = left.pop(old, None)
        if tensor is None or tensor.shape != shape:
            state = "missing" if tensor is None else f"of shape {tensor.shape}"
            raise CheckpointError(
                f"{file.path}: tensor {old!r} is {state}; the metadata asks for {shape}."
            )
        found.append(Target(new, tensor, order))
    if left:
        raise CheckpointError(
            f"{file.path}: tensor {min(left)!r} ({len(left)} in all) does not belong to a"
            f" {config['model_type']} model."
        )
    return found


def _undo_permutation(num_heads: int, head_dim: int) -> RowOrder:
    """The row order that undoes llama.cpp's, which stores the rows of a head as rotation pairs (0,
    d/2), (1, d/2 + 1), …. This order has the first elements of all pairs, then the second ones."""
    return (
        np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2).swapaxes(1, 2).ravel()
    )


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
        f"{file.path}: rope scaling {kind!r} is not supported for GGUF files (none, linear and"
        " Llama 3 are)."
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
    theta = file.get(f"{arch}.rope.freq_base", float) or 10000.0
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


def _shortest(value: float) -> float:
    """The number with the shortest decimal that gives the same float32: 1e-05, not
    9.999999747378752e-06."""
    return float(str(np.float32(value)))
