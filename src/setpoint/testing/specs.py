"""A small decoder's ModelSpec for tests of arithmetic and configuration. It has no checkpoint."""

from __future__ import annotations

from typing import Any

from setpoint.core.model import ModelSpec


def tiny_spec(**fields: Any) -> ModelSpec:
    """The ModelSpec of two layers of width 64 with 4 heads of 16 and 2 key/value heads, tied, in
    bf16. fields: replace or add fields."""
    values: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "model_type": "llama",
        "num_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": 256,
        "context_len": 512,
        "tie_embeddings": True,
        "dtype": "bfloat16",
        "num_parameters": 1_000_000,
    }
    return ModelSpec(**(values | fields))
