"""GLM-4.5 and GLM-4.6: attention that rotates a part of each head, the mixture of DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

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
from setpoint.checkpoint.gguf.deepseek import EXPERTS, KEYS, SIGMOID, mixed_mlp, mixture
from setpoint.checkpoint.gguf.header import GGUFFile
from setpoint.checkpoint.gguf.rotation import rope_scaling


def _layer(layer: LayerTensors) -> Iterator[TensorMapping]:
    config = layer.config
    own = replace(
        layer,
        decoder=replace(
            layer.decoder,
            qkv_bias=config["attention_bias"],
            norms="head" if config["use_qk_norm"] else "",
        ),
    )
    yield plain("attn_norm.weight", "input_layernorm.weight", config["hidden_size"])
    yield from attention(own)
    new = "post_attention_layernorm.weight"
    yield plain("post_attention_norm.weight", new, config["hidden_size"])
    yield from mixed_mlp(layer)


def _glm(file: GGUFFile, decoder: DecoderArchitecture) -> Config:
    found = base(file, decoder) | heads(file, decoder) | mixture(file)
    count(file, "glm4moe.expert_gating_func", default=SIGMOID, low=SIGMOID, high=SIGMOID)
    return found | {
        "attention_bias": any(f"blk.0.attn_{each}.bias" in file.tensors for each in ("q", "qkv")),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "rope_scaling": rope_scaling(file, "glm4moe", rotated(found)),
    }


GLM4_MOE = DecoderArchitecture(
    "Glm4MoeForCausalLM",
    "glm4_moe",
    config=_glm,
    layer=_layer,
    reads=KEYS,
    experts=EXPERTS,
    rotates_a_part=True,
)
