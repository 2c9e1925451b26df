"""The configs of published models, keys that matter and keys that must not, build on the meta
device at their published sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from setpoint.checkpoint.spec import read_spec
from setpoint.engine.models.model_registry import build_model

ONES = {"type": "longrope", "long_factor": [1.5] * 48, "short_factor": [1.0] * 48}


def shape(
    layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocab: int, positions: int
) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "torch_dtype": "bfloat16",
        "initializer_range": 0.02,
        "attention_dropout": 0.0,
        "use_cache": True,
    }


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-5,
}
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
QWEN2 |= {"use_sliding_window": False}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
}
PHI3 = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
PHI3 |= {
    "attention_bias": False,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
}
GEMMA = {
    "attention_bias": False,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "head_dim": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}

PUBLISHED: dict[str, tuple[dict[str, Any], int, int]] = {
    "SmolLM2-135M": (
        {
            **LLAMA,
            **shape(30, 576, 1536, 9, 3, 49152, 8192),
            "is_llama_config": True,
            "rope_interleaved": False,
            "rope_scaling": None,
            "rope_theta": 100000,
            "tie_word_embeddings": True,
            "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        },
        134_515_008,
        8192,
    ),
    "TinyLlama-1.1B": (
        {**LLAMA, **shape(22, 2048, 5632, 32, 4, 32000, 2048), "attention_bias": False},
        1_100_048_384,
        2048,
    ),
    "Llama-3.2-1B": (
        {
            **LLAMA,
            **shape(16, 2048, 8192, 32, 8, 128256, 131072),
            "head_dim": 64,
            "mlp_bias": False,
            "rope_scaling": {**LLAMA3_ROPE, "original_max_position_embeddings": 8192},
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
        },
        1_235_814_400,
        131072,
    ),
    "Qwen2.5-0.5B": (
        {
            **QWEN2,
            **shape(24, 896, 4864, 14, 2, 151936, 32768),
            "max_window_layers": 24,
            "sliding_window": 32768,
            "use_mrope": False,
            "tie_word_embeddings": True,
        },
        494_032_768,
        32768,
    ),
    "Qwen2.5-7B with the model card's yarn": (
        {
            **QWEN2,
            **shape(28, 3584, 18944, 28, 4, 152064, 32768),
            "max_window_layers": 28,
            "sliding_window": 131072,
            "rope_scaling": {
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
                "type": "yarn",
            },
            "tie_word_embeddings": False,
        },
        7_615_616_512,
        131072,
    ),
    "Qwen3-0.6B": (
        {
            **QWEN3,
            **shape(28, 1024, 3072, 16, 8, 151936, 40960),
            "attention_bias": False,
            "head_dim": 128,
            "max_window_layers": 28,
            "rope_scaling": None,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
        },
        596_049_920,
        40960,
    ),
    "Qwen3-4B as transformers 4.57 writes it": (
        {
            **QWEN3,
            **shape(36, 2560, 9728, 32, 8, 151936, 40960),
            "attention_bias": False,
            "head_dim": 128,
            "layer_types": ["full_attention"] * 36,
            "max_window_layers": 36,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
        },
        4_022_468_096,
        40960,
    ),
    "Phi-3-mini-4k": (
        {
            **PHI3,
            **shape(32, 3072, 8192, 32, 32, 32064, 4096),
            "original_max_position_embeddings": 4096,
            "sliding_window": 2047,
        },
        3_821_079_552,
        4096,
    ),
    "Phi-3.5-mini": (
        {
            **PHI3,
            **shape(32, 3072, 8192, 32, 32, 32064, 131072),
            "original_max_position_embeddings": 4096,
            "rope_scaling": ONES,
            "sliding_window": 262144,
        },
        3_821_079_552,
        131072,
    ),
    "Phi-4-mini": (
        {
            **PHI3,
            **shape(32, 3072, 8192, 24, 8, 200064, 131072),
            "full_attn_mod": 1,
            "interpolate_factor": 1,
            "lm_head_bias": False,
            "mlp_bias": False,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.75,
            "rope_scaling": ONES,
            "sliding_window": 262144,
            "tie_word_embeddings": True,
        },
        3_836_021_760,
        131072,
    ),
    "Phi-4": (
        {
            **PHI3,
            **shape(40, 5120, 17920, 40, 10, 100352, 16384),
            "original_max_position_embeddings": 16384,
            "rope_scaling": None,
            "rope_theta": 250000,
            "sliding_window": None,
        },
        14_659_507_200,
        16384,
    ),
    "Mistral-7B-v0.1": (
        {
            **LLAMA,
            **shape(32, 4096, 14336, 32, 8, 32000, 32768),
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": 4096,
        },
        7_241_732_096,
        32768,
    ),
    "gemma-2-2b": (
        {
            **GEMMA,
            **shape(26, 2304, 9216, 8, 4, 256000, 8192),
            "architectures": ["Gemma2ForCausalLM"],
            "model_type": "gemma2",
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "cache_implementation": "hybrid",
            "hidden_act": "gelu_pytorch_tanh",
            "sliding_window": 4096,
        },
        2_614_341_888,
        8192,
    ),
    "gemma-3-1b": (
        {
            **GEMMA,
            **shape(26, 1152, 6912, 4, 1, 262144, 32768),
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "cache_implementation": "hybrid",
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
        },
        999_885_952,
        32768,
    ),
}
"""Name -> config, number of parameters as its files have them, context length."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_builds_at_its_size(tmp_path: Path, name: str) -> None:
    config, num_parameters, context_len = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_spec(tmp_path)
    assert (spec.num_parameters, spec.context_len) == (num_parameters, context_len)
    assert sum(parameter.numel() for parameter in build_model(spec).parameters()) == num_parameters
