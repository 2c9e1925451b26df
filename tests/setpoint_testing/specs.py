"""A small decoder's ModelSpec, which has no checkpoint, and the memory model of a spec, for tests of
arithmetic and configuration."""

from __future__ import annotations

from typing import Any

from setpoint.core.model import ModelSpec
from setpoint.planning.memory import MemoryModel


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


def memory_of(spec: ModelSpec, **fields: Any) -> MemoryModel:
    """The memory model of a server with its defaults on a CPU, in bf16, for the spec's whole
    context. fields: replace."""
    values: dict[str, Any] = {
        "device": "cpu",
        "dtype_bytes": 2,
        "quantization": None,
        "blocks_kept": True,
        "kv_element_bytes": 2,
        "head_copied": True,
        "reference_attention": False,
        "page_size": 16,
        "context_len": spec.context_len,
        "step_tokens": 512,
        "mem_fraction_static": 0.8,
        "fraction_given": False,
        "max_total_tokens": None,
        "requested_slots": None,
    }
    return MemoryModel(spec=spec, **(values | fields))
