"""DeepSeek-V2, and DeepSeek-V3, R1 and Kimi K2: latent attention and a mixture with shared experts.

Newer files have ``kv_b_proj`` in two tensors, and say that a key-value head is shared by all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from setpoint.checkpoint.gguf.architecture import (
    Config,
    DecoderArchitecture,
    Experts,
    LayerTensors,
    TensorMapping,
    expert_matrices,
    mlp,
    plain,
)
from setpoint.checkpoint.gguf.checked_numbers import count, positive, shortest
from setpoint.checkpoint.gguf.config_json import architecture, base, of_experts
from setpoint.checkpoint.gguf.header import GGUFFile
from setpoint.checkpoint.gguf.rotation import rope_scaling
from setpoint.core.errors import CheckpointError
from setpoint.core.model import MAX_LAYERS

EXPERTS = Experts(
    num_key="n_routed_experts",
    sized_by="expert_feed_forward_length",
    size_key="moe_intermediate_size",
    normalise=None,
)
KEYS = frozenset(
    {
        "leading_dense_block_count",
        "nextn_predict_layers",
        "expert_shared_count",
        "expert_weights_scale",
        "expert_gating_func",
        "expert_group_count",
    }
)
"""Keys of the mixture."""
SOFTMAX, SIGMOID = 1, 2
"""Values of ``expert_gating_func``."""


def deepseek_of(file: GGUFFile) -> DecoderArchitecture:
    """DeepSeek-V3's decoder if the scores of experts are corrected for the choice, else that of
    DeepSeek-V2."""
    is_corrected = any(name.endswith(".exp_probs_b.bias") for name in file.tensors)
    gating = count(file, "deepseek2.expert_gating_func", default=0, low=0, high=8) or SOFTMAX
    if gating != (SIGMOID if is_corrected else SOFTMAX):
        corrected = "corrected" if is_corrected else "uncorrected"
        raise CheckpointError(
            f"{file.path}: deepseek2.expert_gating_func = {gating} with {corrected} scores is not"
            " supported."
        )
    return DEEPSEEK_V3 if is_corrected else DEEPSEEK_V2


def mixture(file: GGUFFile) -> Config:
    """The layers with experts, and how tokens choose them."""
    arch = architecture(file)
    num_further = count(file, f"{arch}.nextn_predict_layers", default=0, low=0, high=MAX_LAYERS)
    num_layers = count(file, f"{arch}.block_count") - num_further
    scale = f"{arch}.expert_weights_scale"
    groups = count(file, f"{arch}.expert_group_count", default=0, low=0) or 1
    return of_experts(file, EXPERTS) | {
        "num_hidden_layers": num_layers,
        "num_nextn_predict_layers": num_further,
        "first_k_dense_replace": count(
            file, f"{arch}.leading_dense_block_count", default=0, low=0, high=MAX_LAYERS
        ),
        "n_shared_experts": count(file, f"{arch}.expert_shared_count", default=0, low=0),
        "routed_scaling_factor": positive(file, scale) if file.get(scale, float) else 1.0,
        "n_group": groups,
        "topk_group": count(file, f"{arch}.expert_group_used_count", default=0, low=0) or groups,
    }


def mixed_mlp(layer: LayerTensors) -> Iterator[TensorMapping]:
    """One MLP in the first layers, experts in the others."""
    config = layer.config
    if layer.index < config["first_k_dense_replace"]:
        yield from mlp(layer)
        return
    number = config["n_routed_experts"]
    router = plain("ffn_gate_inp.weight", "mlp.gate.weight", number, config["hidden_size"])
    yield replace(router, is_router=True)
    if layer.has("exp_probs_b.bias"):
        correction = plain("exp_probs_b.bias", "mlp.gate.e_score_correction_bias", number)
        yield replace(correction, is_wide=True)
    yield from expert_matrices(layer, EXPERTS)
    if shared := config["n_shared_experts"]:
        size = config["moe_intermediate_size"] * shared
        yield from mlp(layer, size, suffix="_shexp", name="mlp.shared_experts")


def _layer(layer: LayerTensors) -> Iterator[TensorMapping]:
    hidden = layer.config["hidden_size"]
    yield plain("attn_norm.weight", "input_layernorm.weight", hidden)
    yield from _latent_attention(layer)
    yield plain("ffn_norm.weight", "post_attention_layernorm.weight", hidden)
    yield from mixed_mlp(layer)


def _latent_attention(layer: LayerTensors) -> Iterator[TensorMapping]:
    config = layer.config
    hidden, num_heads = config["hidden_size"], config["num_attention_heads"]
    rank, rope, key_size, value_size = (
        config[key]
        for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    q = num_heads * (key_size + rope)
    if q_rank := config["q_lora_rank"]:
        yield plain("attn_q_a.weight", "self_attn.q_a_proj.weight", q_rank, hidden)
        yield plain("attn_q_a_norm.weight", "self_attn.q_a_layernorm.weight", q_rank)
        yield plain("attn_q_b.weight", "self_attn.q_b_proj.weight", q, q_rank)
    else:
        yield plain("attn_q.weight", "self_attn.q_proj.weight", q, hidden)
    kv_a = "self_attn.kv_a_proj_with_mqa.weight"
    yield plain("attn_kv_a_mqa.weight", kv_a, rank + rope, hidden)
    yield plain("attn_kv_a_norm.weight", "self_attn.kv_a_layernorm.weight", rank)
    whole = num_heads * (key_size + value_size), rank
    if layer.has("attn_kv_b.weight") and not layer.has("attn_k_b.weight"):
        yield plain("attn_kv_b.weight", "self_attn.kv_b_proj.weight", *whole)
    else:
        yield TensorMapping(
            "attn_k_b.weight",
            "self_attn.kv_b_proj.weight",
            whole,
            (num_heads, rank, key_size),
            values="attn_v_b.weight",
        )
    yield plain("attn_output.weight", "self_attn.o_proj.weight", hidden, num_heads * value_size)


def _sizes(file: GGUFFile) -> Config:
    """The sizes of latent attention. Files before May 2025 have those of a head under the keys
    that now have those of the cache."""
    arch, rope = "deepseek2", count(file, "deepseek2.rope.dimension_count")
    ending = "_mla" if f"{arch}.attention.key_length_mla" in file.metadata else ""
    num_heads = count(file, f"{arch}.attention.head_count")
    return {
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "kv_lora_rank": count(file, f"{arch}.attention.kv_lora_rank"),
        "q_lora_rank": count(file, f"{arch}.attention.q_lora_rank", default=0, low=0) or None,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": count(file, f"{arch}.attention.key_length{ending}", low=rope + 1)
        - rope,
        "v_head_dim": count(file, f"{arch}.attention.value_length{ending}"),
    }


def _rope(file: GGUFFile, dim: int) -> dict[str, Any] | None:
    scaling = rope_scaling(file, "deepseek2", dim)
    key = "deepseek2.rope.scaling.yarn_log_multiplier"
    if scaling is not None and scaling["rope_type"] == "yarn" and file.get(key, float):
        # The files have a tenth of mscale_all_dim. Both weights are equal in all releases.
        weight = shortest(10 * positive(file, key))
        scaling |= {"mscale": weight, "mscale_all_dim": weight}
    return scaling


def _deepseek(file: GGUFFile, decoder: DecoderArchitecture) -> Config:
    found = base(file, decoder) | _sizes(file) | mixture(file)
    if decoder is DEEPSEEK_V2:
        is_grouped = found["n_group"] > 1
        found["topk_method"] = "group_limited_greedy" if is_grouped else "greedy"
    return found | {"rope_scaling": _rope(file, found["qk_rope_head_dim"])}


DEEPSEEK_V2 = DecoderArchitecture(
    "DeepseekV2ForCausalLM",
    "deepseek_v2",
    config=_deepseek,
    layer=_layer,
    reads=KEYS,
    experts=EXPERTS,
)
DEEPSEEK_V3 = replace(DEEPSEEK_V2, architecture="DeepseekV3ForCausalLM", model_type="deepseek_v3")
