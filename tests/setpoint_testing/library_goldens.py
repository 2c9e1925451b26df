"""Golden models that run on the layers of the transformers library."""

from __future__ import annotations

from typing import Any

from setpoint_testing.goldens import CONTEXT, Golden, tiny_config


def _through(name: str, architecture: str, model_type: str, **keys: Any) -> Golden:
    """A tiny model on the library's code. A size given as None is left out of its config."""
    config = {
        key: value
        for key, value in tiny_config(architecture, model_type, **keys).items()
        if value is not None or key not in SIZES
    }
    return Golden(f"through transformers: {name}", config, "chatml", model_impl="transformers")


GPT2_NAMES = {
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": CONTEXT,
    "n_inner": None,
    "activation_function": "gelu_new",
}
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
THROUGH_TRANSFORMERS = (
    _through(
        "gpt-neox, partial rotation",
        "GPTNeoXForCausalLM",
        "gpt_neox",
        num_key_value_heads=None,
        rotary_pct=0.5,
        hidden_act="gelu",
    ),
    _through("olmo2", "Olmo2ForCausalLM", "olmo2"),
    _through(
        "stablelm, partial rotation",
        "StableLmForCausalLM",
        "stablelm",
        partial_rotary_factor=0.25,
        use_qkv_bias=True,
    ),
    _through(
        *("granite, multipliers", "GraniteForCausalLM", "granite"),
        attention_multiplier=0.1,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        logits_scaling=2.0,
    ),
    _through(
        "cohere, parallel branches",
        "CohereForCausalLM",
        "cohere",
        logit_scale=0.5,
        tie_word_embeddings=True,
    ),
    _through(
        "starcoder2, window",
        "Starcoder2ForCausalLM",
        "starcoder2",
        sliding_window=16,
        use_bias=True,
        hidden_act="gelu_pytorch_tanh",
    ),
    _through(
        "gpt2, positions learned",
        "GPT2LMHeadModel",
        "gpt2",
        **GPT2_NAMES,
        **dict.fromkeys(SIZES),
        tie_word_embeddings=True,
    ),
    _through(
        "qwen3-moe",
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        head_dim=16,
        moe_intermediate_size=48,
        num_experts=4,
        num_experts_per_tok=2,
    ),
    _through(
        "gemma2, soft caps and windows",
        "Gemma2ForCausalLM",
        "gemma2",
        head_dim=16,
        sliding_window=12,
        query_pre_attn_scalar=24,
    ),
    _through("llama, as one that is declared here too", "LlamaForCausalLM", "llama"),
)
"""Architectures that run on the library's code; the last two have, or may get, declarations of
their own."""
