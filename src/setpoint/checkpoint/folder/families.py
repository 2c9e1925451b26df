"""The properties of model families that config.json leaves out, so that code must supply them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from setpoint.checkpoint.folder import layer_windows as windows
from setpoint.checkpoint.folder import mixtures
from setpoint.checkpoint.folder.configfile import ConfigFile
from setpoint.core.model import Mixture

OTHER_NAMES = (
    ("n_embd", "hidden_size"),
    ("n_layer", "num_hidden_layers"),
    ("n_head", "num_attention_heads"),
    ("n_positions", "max_position_embeddings"),
    ("moe_intermediate_size", "intermediate_size"),
    ("ffn_dim", "intermediate_size"),
    ("n_inner", "intermediate_size"),
)
"""(other name of a key, its usual name): in older configs, in mixture-of-experts configs and in
some families. If a config has several of them, the last line counts."""


@dataclass(slots=True, frozen=True)
class Family:
    """The properties of a family that its configs leave out, and its own rules for keys."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values that transformers' configuration class supplies for absent keys, if they differ from
    the usual ones."""
    stretched: bool = False
    """True if max_position_embeddings already counts the positions that a rope scaling adds."""
    num_rotaries: int = 1
    """Number of rotation tables: one per rotary base."""
    qkv_bias: bool = False
    """True if q, k and v have a bias that no config key mentions."""
    head_norms: bool = False
    """True if each head of q and k has a norm."""
    whole_norms: bool = False
    """True if all heads of q together have a norm, and those of k."""
    sinks: bool = False
    """True if each head of q has a sink."""
    num_norms: int = 2
    """Number of norms over the hidden size in a layer."""
    out_bias: bool = True
    """True if ``attention_bias`` gives the output's projection one, too."""
    latent: bool = False
    """True if attention is latent attention."""
    quantised: str = ""
    """The quantisation in which its checkpoints may be stored."""
    mixture: Callable[[ConfigFile, int], Mixture | None] = mixtures.none
    """(config, number of layers) -> ``ModelSpec.mixture``."""
    windows: Callable[[ConfigFile, int], tuple[int | None, ...]] = windows.none
    """(config, number of layers) -> ``ModelSpec.windows``."""


WRAPPERS = {"Gemma3ForConditionalGeneration": ("Gemma3ForCausalLM", "gemma3_text")}
"""Multimodal architecture -> the architecture and model_type of its language model. Only the
language model is served."""
IN_GGUF = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Glm4MoeForCausalLM",
        "GptOssForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "OlmoeForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
    }
)
"""Architectures of which GGUF files are served, too (``gguf_architectures``, whose import takes
time). GGUF files of Mistral say that they are Llama."""
GEMMA = {
    "tie_word_embeddings": True,
    "head_dim": 256,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}
GEMMA3 = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
}
DEEPSEEK = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
DEEPSEEK_V3 = Family(
    defaults={
        **DEEPSEEK,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
    },
    latent=True,
    mixture=mixtures.corrected,
)
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
FAMILIES = {
    "deepseek_v2": Family(
        defaults={
            **DEEPSEEK,
            "n_routed_experts": 64,
            "moe_intermediate_size": 1407,
            "n_shared_experts": 2,
        },
        latent=True,
        mixture=mixtures.deepseek,
    ),
    "deepseek_v3": DEEPSEEK_V3,
    "glm4_moe": Family(
        defaults={
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
        out_bias=False,
        mixture=mixtures.corrected,
    ),
    "kimi_k2": DEEPSEEK_V3,
    "gemma2": Family(
        defaults={**GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        num_norms=4,
        windows=windows.alternating,
    ),
    "gemma3_text": Family(
        defaults=GEMMA | GEMMA3,
        stretched=True,
        num_rotaries=2,
        head_norms=True,
        num_norms=4,
        windows=windows.gemma3,
    ),
    "gpt_oss": Family(
        defaults={
            "num_hidden_layers": 36,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 201_088,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "max_position_embeddings": 131_072,
            "sliding_window": 128,
            "attention_bias": True,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "rope_parameters": GPT_OSS_ROPE,
        },
        sinks=True,
        quantised="mxfp4",
        windows=windows.alternating,
        mixture=mixtures.gpt_oss,
    ),
    "mistral": Family(defaults={"sliding_window": 4096}, windows=windows.every_layer),
    "mixtral": Family(
        defaults={"num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5},
        windows=windows.every_layer,
        mixture=mixtures.mixtral,
    ),
    "olmoe": Family(
        defaults={"num_experts": 64, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5},
        whole_norms=True,
        mixture=mixtures.olmoe,
    ),
    "phi3": Family(
        defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        windows=windows.every_layer,
    ),
    "qwen2": Family(qkv_bias=True, windows=windows.qwen),
    "qwen2_moe": Family(
        defaults={
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        qkv_bias=True,
        windows=windows.qwen,
        mixture=mixtures.qwen,
    ),
    "qwen3": Family(defaults={"head_dim": 128}, head_norms=True, windows=windows.qwen),
    "qwen3_moe": Family(
        defaults={"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        head_norms=True,
        windows=windows.qwen,
        mixture=mixtures.qwen,
    ),
}
"""model_type -> its family, from transformers' DeepseekV2Config, DeepseekV3Config (which Kimi K2
uses under another name), Glm4MoeConfig, Gemma2Config, Gemma3TextConfig, GptOssConfig,
MistralConfig, MixtralConfig, OlmoeConfig, Phi3Config, Qwen2Config, Qwen2MoeConfig, Qwen3Config and
Qwen3MoeConfig."""
GATED = frozenset({"llama", *FAMILIES})
"""model_type of families in which every MLP has the three matrices gate, up and down, and whose
configs say whether the head is tied. The number of their parameters follows from the dimensions."""
