"""Llama 2 and 3.x, and SmolLM2: the standard pre-norm decoder. Mistral: the same with a window."""

from __future__ import annotations

from setpoint.core.model import ModelSpec
from setpoint.engine.layers.attention import PagedAttention
from setpoint.engine.layers.mlp import GatedMLP
from setpoint.engine.models.decoder import (
    CausalLM,
    PreNormLayer,
    SelfAttention,
    causal_lm,
)
from setpoint.engine.models.model_config import ConfigReader


def llama(spec: ModelSpec, config: ConfigReader) -> CausalLM:
    """Llama and SmolLM2: biases only if the config asks for them."""
    eps, gated = config.number("rms_norm_eps", 1e-6), config.gated()
    bias, mlp_bias = config.flag("attention_bias"), config.flag("mlp_bias")

    def layer(index: int) -> PreNormLayer:
        attention = SelfAttention(
            spec, PagedAttention(index, spec.head_dim), qkv_bias=bias, out_bias=bias
        )
        return PreNormLayer(
            spec,
            eps,
            attention,
            GatedMLP(spec.hidden_size, spec.intermediate_size, gated, bias=mlp_bias),
        )

    return causal_lm(spec, eps, map(layer, range(spec.num_layers)))


def mistral(spec: ModelSpec, config: ConfigReader) -> CausalLM:
    """Mistral: all layers have the window; none has one if ``sliding_window`` is null (as since
    version 0.2)."""
    eps, gated, windows = (
        config.number("rms_norm_eps", 1e-6),
        config.gated(),
        config.windows(spec, "sliding_window"),
    )

    def layer(index: int) -> PreNormLayer:
        attention = SelfAttention(spec, PagedAttention(index, spec.head_dim, window=windows[index]))
        return PreNormLayer(
            spec, eps, attention, GatedMLP(spec.hidden_size, spec.intermediate_size, gated)
        )

    return causal_lm(spec, eps, map(layer, range(spec.num_layers)))
