"""gpt-oss: attention with sinks, every other layer over a window, experts with biases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from setpoint.checkpoint.gguf.architecture import (
    MLP,
    Config,
    DecoderArchitecture,
    Experts,
    LayerTensors,
    TensorMapping,
    attention,
    expert_matrices,
    plain,
)
from setpoint.checkpoint.gguf.checked_numbers import count
from setpoint.checkpoint.gguf.config_json import base, heads, of_experts
from setpoint.checkpoint.gguf.header import GGUFFile
from setpoint.checkpoint.gguf.rotation import rope_scaling

EXPERTS = Experts(
    num_key="num_local_experts",
    sized_by="expert_feed_forward_length",
    size_key="intermediate_size",
    normalise=True,
)
WINDOW = "attention.sliding_window"


def _layer(layer: LayerTensors) -> Iterator[TensorMapping]:
    config = layer.config
    hidden, number = config["hidden_size"], config["num_local_experts"]
    yield plain("attn_norm.weight", "input_layernorm.weight", hidden)
    yield from attention(layer)
    yield plain("attn_output.bias", "self_attn.o_proj.bias", hidden)
    yield plain("attn_sinks.weight", "self_attn.sinks", config["num_attention_heads"])
    yield plain("post_attention_norm.weight", "post_attention_layernorm.weight", hidden)
    router = plain("ffn_gate_inp.weight", "mlp.router.weight", number, hidden)
    yield replace(router, is_router=True)
    yield plain("ffn_gate_inp.bias", "mlp.router.bias", number)
    yield from expert_matrices(layer, EXPERTS)
    for kind, name in MLP:
        size = hidden if kind == "down" else config["intermediate_size"]
        new = f"mlp.experts.{{}}.{name}.bias"
        yield TensorMapping(f"ffn_{kind}_exps.bias", new, (size,), (number, size))


def _gpt_oss(file: GGUFFile, decoder: DecoderArchitecture) -> Config:
    found = base(file, decoder) | heads(file, decoder) | of_experts(file, EXPERTS)
    scaling = rope_scaling(file, "gpt-oss", found["head_dim"])
    if scaling is not None and scaling["rope_type"] == "yarn":
        scaling["truncate"] = False  # as in all releases; files do not say it
    return found | {
        "attention_bias": True,
        "sliding_window": count(file, f"gpt-oss.{WINDOW}"),
        "rope_scaling": scaling,
    }


GPT_OSS = DecoderArchitecture(
    "GptOssForCausalLM",
    "gpt_oss",
    config=_gpt_oss,
    layer=_layer,
    reads=frozenset({WINDOW}),
    qkv_bias=True,
    experts=EXPERTS,
)
