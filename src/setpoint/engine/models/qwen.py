"""Qwen2 and 2.5 (a bias on q, k and v) and Qwen3 (a norm over each head of q and k)."""

from __future__ import annotations

from setpoint.core.model import ModelSpec
from setpoint.engine.layers.attention import PagedAttention
from setpoint.engine.layers.mlp import GatedMLP
from setpoint.engine.layers.norm import RMSNorm
from setpoint.engine.models.decoder import (
    CausalLM,
    PreNormLayer,
    SelfAttention,
    causal_lm,
)
from setpoint.engine.models.model_config import ConfigReader

WINDOW_KEYS = ("sliding_window", "use_sliding_window", "layer_types", "max_window_layers")


def qwen2(spec: ModelSpec, config: ConfigReader) -> CausalLM:
    eps, gated = config.number("rms_norm_eps", 1e-6), config.gated()
    windows = config.windows(spec, *WINDOW_KEYS)

    def layer(index: int) -> PreNormLayer:
        attention = SelfAttention(
            spec, PagedAttention(index, spec.head_dim, window=windows[index]), qkv_bias=True
        )
        return PreNormLayer(
            spec, eps, attention, GatedMLP(spec.hidden_size, spec.intermediate_size, gated)
        )

    return causal_lm(spec, eps, map(layer, range(spec.num_layers)))


def qwen3(spec: ModelSpec, config: ConfigReader) -> CausalLM:
    eps, gated = config.number("rms_norm_eps", 1e-6), config.gated()
    bias, windows = config.flag("attention_bias"), config.windows(spec, *WINDOW_KEYS)

    def layer(index: int) -> PreNormLayer:
        attend = PagedAttention(index, spec.head_dim, window=windows[index])
        attention = SelfAttention(
            spec, attend, qkv_bias=bias, out_bias=bias, head_norm=lambda size: RMSNorm(size, eps)
        )
        return PreNormLayer(
            spec, eps, attention, GatedMLP(spec.hidden_size, spec.intermediate_size, gated)
        )

    return causal_lm(spec, eps, map(layer, range(spec.num_layers)))
