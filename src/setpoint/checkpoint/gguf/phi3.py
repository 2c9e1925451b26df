"""Phi-3, Phi-3.5 and Phi-4: q, k and v are one matrix, and so are gate and up."""

from __future__ import annotations

from collections.abc import Iterator

from setpoint.checkpoint.gguf.architecture import (
    Config,
    DecoderArchitecture,
    LayerTensors,
    TensorMapping,
    attention,
    plain,
)
from setpoint.checkpoint.gguf.checked_numbers import count
from setpoint.checkpoint.gguf.config_json import base, heads, rotated
from setpoint.checkpoint.gguf.header import GGUFFile
from setpoint.checkpoint.gguf.rotation import original_context, rope_scaling

WINDOW = "attention.sliding_window"


def _layer(layer: LayerTensors) -> Iterator[TensorMapping]:
    hidden, inner = layer.config["hidden_size"], layer.config["intermediate_size"]
    yield plain("attn_norm.weight", "input_layernorm.weight", hidden)
    yield from attention(layer)
    yield plain("ffn_norm.weight", "post_attention_layernorm.weight", hidden)
    yield plain("ffn_up.weight", "mlp.gate_up_proj.weight", 2 * inner, hidden)
    yield plain("ffn_down.weight", "mlp.down_proj.weight", hidden, inner)


def _phi3(file: GGUFFile, decoder: DecoderArchitecture) -> Config:
    found = base(file, decoder) | heads(file, decoder)
    return found | {
        "original_max_position_embeddings": original_context(file, "phi3"),
        "rope_scaling": rope_scaling(file, "phi3", rotated(found)),
        # llama.cpp 11434 has the key and computes without windows; the models have them.
        "sliding_window": count(file, f"phi3.{WINDOW}", default=0, low=0) or None,
    }


PHI3 = DecoderArchitecture(
    "Phi3ForCausalLM",
    "phi3",
    config=_phi3,
    layer=_layer,
    reads=frozenset({WINDOW}),
    rotates_a_part=True,
)
