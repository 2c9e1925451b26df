"""Mixtures of experts whose layers are otherwise those of a family without: Mixtral, OLMoE,
Qwen2-MoE and Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Callable

from setpoint.core.model import ModelSpec
from setpoint.engine.kernels.ops import Routing
from setpoint.engine.layers.attention import PagedAttention
from setpoint.engine.layers.experts import SparseMLP
from setpoint.engine.layers.mlp import GatedMLP
from setpoint.engine.layers.norm import RMSNorm
from setpoint.engine.models.decoder import CausalLM, PreNormLayer, SelfAttention, causal_lm
from setpoint.engine.models.model_config import ConfigReader
from setpoint.engine.models.qwen import WINDOW_KEYS


def mixtral(spec: ModelSpec, config: ConfigReader) -> CausalLM:
    eps, gated = config.number("rms_norm_eps", 1e-5), config.gated()
    windows, mixture = config.windows(spec, "sliding_window"), config.mixture(spec)
    routing = Routing(mixture.num_chosen, normalise=True)

    def layer(index: int) -> PreNormLayer:
        attention = SelfAttention(spec, PagedAttention(index, spec.head_dim, window=windows[index]))
        names = ("w1", "w3", "w2")
        mlp = SparseMLP(spec.hidden_size, mixture, gated, routing, names=names)
        return PreNormLayer(spec, eps, attention, mlp, mlp_name="block_sparse_moe")

    return causal_lm(spec, eps, map(layer, range(spec.num_layers)))


def olmoe(spec: ModelSpec, config: ConfigReader) -> CausalLM:
    """OLMoE: q and k have a norm over all their heads together."""
    eps, gated = config.number("rms_norm_eps", 1e-5), config.gated()
    bias, mixture = config.flag("attention_bias"), config.mixture(spec)
    routing = Routing(mixture.num_chosen, normalise=config.flag("norm_topk_prob"))

    def layer(index: int) -> PreNormLayer:
        attention = SelfAttention(
            spec,
            PagedAttention(index, spec.head_dim),
            qkv_bias=bias,
            out_bias=bias,
            whole_norm=lambda size: RMSNorm(size, eps),
        )
        mlp = SparseMLP(spec.hidden_size, mixture, gated, routing)
        return PreNormLayer(spec, eps, attention, mlp)

    return causal_lm(spec, eps, map(layer, range(spec.num_layers)))


def qwen2_moe(spec: ModelSpec, config: ConfigReader) -> CausalLM:
    eps, bias = config.number("rms_norm_eps", 1e-6), config.flag("qkv_bias", default=True)
    windows = config.windows(spec, *WINDOW_KEYS)

    def attention(index: int) -> SelfAttention:
        attend = PagedAttention(index, spec.head_dim, window=windows[index])
        return SelfAttention(spec, attend, qkv_bias=bias)

    return _qwen(spec, config, eps, attention)


def qwen3_moe(spec: ModelSpec, config: ConfigReader) -> CausalLM:
    eps, bias = config.number("rms_norm_eps", 1e-6), config.flag("attention_bias")
    windows = config.windows(spec, *WINDOW_KEYS)

    def attention(index: int) -> SelfAttention:
        attend = PagedAttention(index, spec.head_dim, window=windows[index])
        return SelfAttention(
            spec, attend, qkv_bias=bias, out_bias=bias, head_norm=lambda size: RMSNorm(size, eps)
        )

    return _qwen(spec, config, eps, attention)


def _qwen(
    spec: ModelSpec,
    config: ConfigReader,
    eps: float,
    attention: Callable[[int], SelfAttention],
) -> CausalLM:
    gated, mixture = config.gated(), config.mixture(spec)
    routing = Routing(mixture.num_chosen, normalise=config.flag("norm_topk_prob"))

    def layer(index: int) -> PreNormLayer:
        mlp = (
            SparseMLP(spec.hidden_size, mixture, gated, routing)
            if index in mixture.layers
            else GatedMLP(spec.hidden_size, spec.intermediate_size, gated)
        )
        return PreNormLayer(spec, eps, attention(index), mlp)

    return causal_lm(spec, eps, map(layer, range(spec.num_layers)))
