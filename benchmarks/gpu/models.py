"""The models that are measured on a GPU: configs of published shapes, whose weights are random, and
tiny models of the same kinds for a rehearsal on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LLAMA_8B, QWEN3_0_6B, GPT_OSS, V2_LITE, QWEN3_30B = (
    "Llama-3.1-8B",
    "Qwen3-0.6B",
    "gpt-oss-20b",
    "DeepSeek-V2-Lite",
    "Qwen3-30B-A3B",
)
NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
CONFIGS: dict[str, dict[str, Any]] = {
    # https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json
    LLAMA_8B: {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
    },
    # https://huggingface.co/Qwen/Qwen3-0.6B/blob/main/config.json
    QWEN3_0_6B: {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "tie_word_embeddings": True,
    },
    # https://huggingface.co/openai/gpt-oss-20b/blob/main/config.json
    GPT_OSS: {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    # https://huggingface.co/deepseek-ai/DeepSeek-V2-Lite/blob/main/config.json
    V2_LITE: {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "vocab_size": 102400,
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
        },
        "tie_word_embeddings": False,
    },
    # https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json
    QWEN3_30B: {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    },
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "layer_types": ["sliding_attention", "full_attention"],
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
"""What a tiny model has instead, of the keys that its config has."""


def config_of(name: str, *, tiny: bool) -> dict[str, Any]:
    """The config.json of a model."""
    config = dict(CONFIGS[name])
    if tiny:
        config |= {key: value for key, value in TINY.items() if key in config}
        config.pop("rope_scaling", None)
        if name == V2_LITE:  # whose heads have keys of their own, made of one vector
            config["num_key_value_heads"] = config["num_attention_heads"]
    return {**config, **NO_IDS, "hidden_act": "silu", "torch_dtype": "bfloat16"}


def write_model(folder: Path, name: str, *, tiny: bool = False) -> Path:
    """Write a model without weights (``--load-format dummy``) into a folder in ``folder``, which is
    returned."""
    path = folder / (f"tiny-{name}" if tiny else name)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config_of(name, tiny=tiny), indent=1))
    return path
