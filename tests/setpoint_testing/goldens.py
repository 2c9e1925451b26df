"""The table of golden models: every supported architecture and variant, as the config.json of a
tiny random model.

Only data; ``setpoint_testing.against_transformers`` measures an entry. Tests and ``benchmarks/goldens.py``
read this one table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from setpoint_testing.byte_tokenizer import VOCAB_SIZE

CONTEXT = 256


@dataclass(slots=True, frozen=True)
class Golden:
    """A tiny model, and the prompts that it is measured with."""

    name: str
    config: dict[str, Any]
    """config.json, as a checkpoint of this kind has it."""
    template: str
    """The chat template of its family, as a key of ``chat_templates.TEMPLATES``."""
    context_len: int = CONTEXT
    prompt_lengths: tuple[int, ...] = (1, 23, 37, 90)
    model_impl: str = "setpoint"


def tiny_config(architecture: str, model_type: str, **keys: Any) -> dict[str, Any]:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": CONTEXT,
    }
    shared = {
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    no_ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return {
        "architectures": [architecture],
        "model_type": model_type,
        **sizes,
        **shared,
        **no_ids,
        **keys,
    }


def _llama(name: str, *, context_len: int = CONTEXT, **keys: Any) -> Golden:
    return Golden(
        f"llama: {name}",
        tiny_config("LlamaForCausalLM", "llama", **keys),
        "chatml",
        context_len=context_len,
    )


def _qwen2(name: str, **keys: Any) -> Golden:
    windows = {"use_sliding_window": False, "sliding_window": 20, "max_window_layers": 1}
    return Golden(
        f"qwen2: {name}", tiny_config("Qwen2ForCausalLM", "qwen2", **{**windows, **keys}), "qwen2"
    )


def _qwen3(name: str, **keys: Any) -> Golden:
    own = {
        "head_dim": 32,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 2,
    }
    return Golden(
        f"qwen3: {name}", tiny_config("Qwen3ForCausalLM", "qwen3", **{**own, **keys}), "qwen3"
    )


def _phi3(
    name: str,
    *,
    context_len: int = CONTEXT,
    lengths: tuple[int, ...] = (1, 23, 37, 90),
    **keys: Any,
) -> Golden:
    own = {
        "attention_bias": False,
        "original_max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
    }
    config = tiny_config("Phi3ForCausalLM", "phi3", **{**own, **keys})
    return Golden(f"phi3: {name}", config, "phi3", context_len=context_len, prompt_lengths=lengths)


def _mistral(name: str, **keys: Any) -> Golden:
    return Golden(
        f"mistral: {name}", tiny_config("MistralForCausalLM", "mistral", **keys), "mistral"
    )


def _gemma(name: str, architecture: str, model_type: str, **keys: Any) -> Golden:
    """A Gemma model. Like the released configs, its config omits tie_word_embeddings, which is
    true."""
    own = {
        "num_hidden_layers": 4,
        "head_dim": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 16,
    }
    config = tiny_config(architecture, model_type, **{**own, "query_pre_attn_scalar": 24, **keys})
    for key in ("tie_word_embeddings", "hidden_act"):
        if key not in keys:
            del config[key]
    return Golden(f"{model_type}: {name}", config, "gemma")


def _gemma2(name: str, **keys: Any) -> Golden:
    caps = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0}
    return _gemma(name, "Gemma2ForCausalLM", "gemma2", **{**caps, **keys})


def _gemma3(name: str, **keys: Any) -> Golden:
    ropes = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 3}
    return _gemma(name, "Gemma3ForCausalLM", "gemma3_text", **{**ropes, **keys})


def _mixture(name: str, architecture: str, template: str, **keys: Any) -> Golden:
    model_type = {"MixtralForCausalLM": "mixtral", "OlmoeForCausalLM": "olmoe"}.get(
        architecture, f"{architecture[:5].lower()}_moe"
    )
    own = {"num_experts_per_tok": 2, "sliding_window": None}
    config = tiny_config(architecture, model_type, **{**own, **keys})
    return Golden(f"{model_type}: {name}", config, template)


def _mixtral(name: str, **keys: Any) -> Golden:
    return _mixture(name, "MixtralForCausalLM", "mistral", **{"num_local_experts": 4, **keys})


def _olmoe(name: str, **keys: Any) -> Golden:
    own = {"num_experts": 6, "norm_topk_prob": False, "rms_norm_eps": 1e-5}
    return _mixture(name, "OlmoeForCausalLM", "chatml", **{**own, **keys})


def _qwen_moe(version: int, name: str, **keys: Any) -> Golden:
    own = {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
        "max_window_layers": 2,
    }
    own |= {"shared_expert_intermediate_size": 96} if version == 2 else {"head_dim": 32}
    architecture = f"Qwen{version}MoeForCausalLM"
    return _mixture(name, architecture, f"qwen{version}", **{**own, **keys})


def _deepseek(version: int, name: str, **keys: Any) -> Golden:
    own = {
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 48,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 24,
        "v_head_dim": 20,
        "moe_intermediate_size": 48,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": version == 3,
    }
    config = tiny_config(
        f"DeepseekV{version}ForCausalLM", f"deepseek_v{version}", **{**own, **keys}
    )
    return Golden(f"deepseek_v{version}: {name}", config, "chatml")


def _glm(name: str, **keys: Any) -> Golden:
    own = {
        "moe_intermediate_size": 48,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "head_dim": 32,
    }
    config = tiny_config("Glm4MoeForCausalLM", "glm4_moe", **{**own, **keys})
    return Golden(f"glm4_moe: {name}", config, "chatml")


def _gpt_oss(name: str, **keys: Any) -> Golden:
    own = {
        "num_hidden_layers": 3,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "head_dim": 32,
        "sliding_window": 16,
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
    }
    config = tiny_config("GptOssForCausalLM", "gpt_oss", **{**own, **keys})
    return Golden(f"gpt_oss: {name}", config, "chatml")


LOCAL, GLOBAL = "sliding_attention", "full_attention"
MSCALE = {"mscale": 0.707, "mscale_all_dim": 0.9, "beta_fast": 2.0}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
GPT_OSS_YARN = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _longrope(pairs: int) -> dict[str, Any]:
    return {
        "type": "longrope",
        "short_factor": [1.0 + 0.05 * pair for pair in range(pairs)],
        "long_factor": [1.0 + 1.5 * pair for pair in range(pairs)],
    }


BEYOND = (33, 40, 70, 90)
"""Prompts longer than an original length of 32: from there on transformers uses the long list for a
sequence."""

GOLDENS = (
    _llama("two queries per key"),
    _llama("four queries per key, odd head size", num_key_value_heads=1, head_dim=12),
    _llama("one query per key, tied", num_key_value_heads=4, tie_word_embeddings=True),
    _llama("biases", attention_bias=True, mlp_bias=True),
    _llama("linear rope", rope_scaling={"rope_type": "linear", "factor": 4.0}),
    _llama("linear rope, older key", rope_scaling={"type": "linear", "factor": 2.0}),
    _llama(
        "dynamic rope, within the trained length",
        rope_scaling={"rope_type": "dynamic", "factor": 2.0},
    ),
    _llama("yarn rope", rope_scaling={**YARN, "beta_fast": 2.0}, max_position_embeddings=64),
    _llama("llama3 rope", rope_scaling=LLAMA3, rope_theta=500000.0),
    _llama(
        "rope_parameters as transformers 5 writes them",
        rope_parameters={**LLAMA3, "rope_theta": 1000.0},
    ),
    _qwen2("2.5, untied", rope_theta=1e6),
    _qwen2("2.5, tied", rope_theta=1e6, tie_word_embeddings=True),
    _qwen2("2.5, windows on the later layers", use_sliding_window=True),
    _qwen2("2.5, yarn rope", rope_theta=1e6, rope_scaling=YARN, max_position_embeddings=64),
    _qwen3("tied", rope_theta=1e6, tie_word_embeddings=True),
    _qwen3("untied, biases", attention_bias=True),
    _qwen3(
        "windows by layer type",
        use_sliding_window=True,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
    _qwen3("yarn rope", rope_scaling={**YARN, "rope_type": "yarn"}, max_position_embeddings=64),
    _mixtral("two of four experts"),
    _mixtral("windows, tied", sliding_window=16, tie_word_embeddings=True),
    _olmoe("two of six experts, norms over all heads"),
    _olmoe("one query per key, normalised", num_key_value_heads=4, norm_topk_prob=True),
    _qwen_moe(2, "shared expert"),
    _qwen_moe(2, "every other layer dense", decoder_sparse_step=2, norm_topk_prob=True),
    _qwen_moe(3, "three of eight experts", norm_topk_prob=True),
    _qwen_moe(3, "first layer dense, tied", mlp_only_layers=[0], tie_word_embeddings=True),
    _qwen_moe(3, "one expert, biases", num_experts=1, num_experts_per_tok=1, attention_bias=True),
    _deepseek(2, "greedy", topk_method="greedy", n_group=1, topk_group=1),
    _deepseek(
        2,
        "groups, queries without a latent vector, yarn",
        topk_method="group_limited_greedy",
        q_lora_rank=None,
        routed_scaling_factor=16.0,
        rope_scaling={**YARN, **MSCALE},
        max_position_embeddings=64,
    ),
    _deepseek(2, "every layer sparse, biases", first_k_dense_replace=0, attention_bias=True),
    _deepseek(3, "groups", routed_scaling_factor=2.5),
    _deepseek(
        3,
        "queries without a latent vector, yarn, no groups",
        q_lora_rank=None,
        n_group=1,
        topk_group=1,
        rope_scaling={**YARN, **MSCALE, "mscale": 0.9},
        max_position_embeddings=64,
    ),
    _deepseek(
        3,
        "halves rotated, not normalised, biases",
        rope_interleave=False,
        norm_topk_prob=False,
        attention_bias=True,
    ),
    _glm("norms of heads, groups", use_qk_norm=True, n_group=4, topk_group=2),
    _glm("biases, tied", attention_bias=True, tie_word_embeddings=True, rms_norm_eps=1e-5),
    _gpt_oss(
        "yarn as it is released, two of six experts",
        rope_scaling={**GPT_OSS_YARN, "factor": 4.0, "original_max_position_embeddings": 64},
    ),
    _gpt_oss(
        "layer_types, no biases of attention, a low limit",
        rope_scaling={"rope_type": "default"},
        layer_types=[GLOBAL, LOCAL, GLOBAL],
        attention_bias=False,
        swiglu_limit=0.3,
        swiglu_alpha=1.1,
        num_experts_per_tok=4,
    ),
    _gpt_oss("what the config leaves out", tie_word_embeddings=True),
    _phi3("mini 4k, window", num_key_value_heads=4, sliding_window=16),
    _phi3("4, no window", num_key_value_heads=1),
    _phi3(
        "mini 128k, long list",
        original_max_position_embeddings=32,
        rope_scaling=_longrope(8),
        lengths=BEYOND,
    ),
    _phi3(
        "mini 128k, short list",
        original_max_position_embeddings=128,
        rope_scaling=_longrope(8),
        context_len=128,
    ),
    _phi3(
        "4 mini: tied, partial rotation, long list",
        original_max_position_embeddings=32,
        rope_scaling=_longrope(6),
        partial_rotary_factor=0.75,
        tie_word_embeddings=True,
        lengths=BEYOND,
    ),
    _mistral("0.1: a window", sliding_window=16),
    _mistral("0.3: no window", sliding_window=None, rope_theta=1e6),
    _mistral("nemo: heads wider than the model", sliding_window=None, head_dim=32),
    _mistral("tied, a window of one token", sliding_window=1, tie_word_embeddings=True),
    _gemma2("caps, untied", tie_word_embeddings=False),
    _gemma2(
        "no caps, untied",
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        tie_word_embeddings=False,
        attention_bias=True,
    ),
    _gemma2(
        "layer_types, 256 wide heads",
        layer_types=[GLOBAL, LOCAL, LOCAL, GLOBAL],
        head_dim=256,
        num_attention_heads=8,
    ),
    _gemma3("two local to one global"),
    _gemma3(
        "linear rope on global layers",
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        num_key_value_heads=1,
    ),
    _gemma3(
        "rope_parameters and layer_types as transformers 5 writes them",
        layer_types=[LOCAL, GLOBAL, GLOBAL, LOCAL],
        rope_parameters={
            LOCAL: {"rope_type": "default", "rope_theta": 100.0},
            GLOBAL: {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e5},
        },
        final_logit_softcapping=30.0,
    ),
)
