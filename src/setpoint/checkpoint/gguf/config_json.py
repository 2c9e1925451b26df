"""Maps a GGUF file's metadata to config.json: the parts that architectures share.

Works on a parsed header. It knows nothing of quantisation or of the files on disk.
"""

from __future__ import annotations

from typing import Any

from setpoint.checkpoint.gguf.architecture import Config, DecoderArchitecture, Experts
from setpoint.checkpoint.gguf.checked_numbers import count, positive
from setpoint.checkpoint.gguf.header import GGUFFile
from setpoint.checkpoint.gguf.rotation import rope_base, rope_scaling
from setpoint.core.errors import CheckpointError
from setpoint.core.excerpt import excerpt
from setpoint.core.model import MAX_LAYERS

NEUTRAL: tuple[tuple[str, tuple[float, ...]], ...] = (
    ("attention.sliding_window", (0,)),
    ("attention.clamp_kqv", (0.0,)),
    ("attention.scale", (0.0,)),
    ("attention.temperature_scale", (0.0,)),
    ("attn_logit_softcapping", (0.0,)),
    ("final_logit_softcapping", (0.0,)),
    ("logit_scale", (0.0,)),
    ("embedding_scale", (0.0,)),
    ("residual_scale", (0.0,)),
    ("leading_dense_block_count", (0,)),
    ("nextn_predict_layers", (0,)),
    ("expert_shared_count", (0,)),
    ("expert_weights_scale", (0.0, 1.0)),
    ("expert_gating_func", (0, 1)),  # softmax
    ("expert_group_count", (0, 1)),
    ("swiglu_clamp_exp", ()),
    ("swiglu_clamp_shexp", ()),
)
"""(key that changes the computation, values that mean "not used"). Any other value is refused,
unless the decoder reads the key."""


def read_config(file: GGUFFile, decoder: DecoderArchitecture) -> Config:
    """The part of config.json that describes the model. The caller adds the token ids and the
    dtype. Raises CheckpointError for a value that is missing or not supported."""
    arch = architecture(file)
    neutral = [*NEUTRAL, *([] if decoder.experts else [("expert_count", (0,))])]
    for key, values in neutral:
        value = file.metadata.get(f"{arch}.{key}")
        if value is not None and key not in decoder.reads and value not in values:
            raise CheckpointError(
                f"{file.path}: {arch}.{key} = {excerpt(str(value))} is not supported."
            )
    return decoder.config(file, decoder)


def architecture(file: GGUFFile) -> str:
    return file.require("general.architecture", str)


def usual_config(file: GGUFFile, decoder: DecoderArchitecture) -> Config:
    """Attention with heads of one size, and an MLP or experts in every layer."""
    arch = architecture(file)
    found = base(file, decoder) | heads(file, decoder)
    if decoder.experts:
        found |= of_experts(file, decoder.experts)
    return found | {"rope_scaling": rope_scaling(file, arch, rotated(found))}


def base(file: GGUFFile, decoder: DecoderArchitecture) -> Config:
    """What all decoders have."""
    arch = architecture(file)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(
            f"{file.path}: tensor 'token_embd.weight' is missing, so the model is incomplete."
        )
    return {
        "architectures": [decoder.architecture],
        "model_type": decoder.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": file.require(f"{arch}.embedding_length", int),
        "intermediate_size": file.require(f"{arch}.feed_forward_length", int),
        "num_hidden_layers": count(file, f"{arch}.block_count", high=MAX_LAYERS),
        "hidden_act": "silu",
        "max_position_embeddings": count(file, f"{arch}.context_length"),
        "rms_norm_eps": positive(file, f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_theta": rope_base(file, f"{arch}.rope.freq_base"),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }


def heads(file: GGUFFile, decoder: DecoderArchitecture) -> Config:
    """The numbers and the size of the heads, and how much of a head is rotated."""
    arch = architecture(file)
    hidden = count(file, f"{arch}.embedding_length")
    num_heads = file.require(f"{arch}.attention.head_count", int)
    num_kv_heads = file.get(f"{arch}.attention.head_count_kv", int) or num_heads
    if num_heads < 1 or num_heads % num_kv_heads:
        raise CheckpointError(
            f"{file.path}: {num_heads} attention heads cannot share {num_kv_heads} key-value heads."
        )
    head_dim = file.get(f"{arch}.attention.key_length", int) or hidden // num_heads
    rotated = file.get(f"{arch}.rope.dimension_count", int) or head_dim
    sizes = {"attention.value_length": file.get(f"{arch}.attention.value_length", int) or head_dim}
    if not decoder.rotates_a_part:
        sizes["rope.dimension_count"] = rotated
    for key, size in sizes.items():
        if size != head_dim:
            raise CheckpointError(
                f"{file.path}: {arch}.{key} differs from the head size {head_dim}; that is not"
                " supported."
            )
    found = {
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
    }
    if not decoder.rotates_a_part:
        return found
    if rotated > head_dim or rotated % 2:
        raise CheckpointError(
            f"{file.path}: {arch}.rope.dimension_count is {rotated}; it must be even and at most"
            f" the head size, {head_dim}."
        )
    return found | {"partial_rotary_factor": rotated / head_dim}


def rotated(config: Config) -> int:
    """How many numbers of a head are rotated."""
    return int(config["head_dim"] * config.get("partial_rotary_factor", 1.0))


def of_experts(file: GGUFFile, experts: Experts) -> Config:
    arch = architecture(file)
    number = file.require(f"{arch}.expert_count", int)
    chosen = file.require(f"{arch}.expert_used_count", int)
    if not 1 <= chosen <= number:
        raise CheckpointError(
            f"{file.path}: {arch}.expert_used_count is {chosen}, but there are {number} experts."
        )
    normalise = file.get(f"{arch}.expert_weights_norm", bool)
    if experts.normalise is not None and normalise not in (None, experts.normalise):
        raise CheckpointError(
            f"{file.path}: {arch}.expert_weights_norm = {normalise} is not supported."
        )
    found: dict[str, Any] = {
        experts.num_key: number,
        "num_experts_per_tok": chosen,
        experts.size_key: file.require(f"{arch}.{experts.sized_by}", int),
        "norm_topk_prob": bool(normalise) if experts.normalise is None else experts.normalise,
    }
    if experts.is_shared:
        found["shared_expert_intermediate_size"] = file.require(
            f"{arch}.expert_shared_feed_forward_length", int
        )
    return found
