"""Mixtures of experts whose layers are otherwise those of a family without: Mixtral, OLMoE,
Qwen2-MoE, Qwen3-MoE and GLM-4.5."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from setpoint.core.model import ModelSpec
from setpoint.engine.kernels.ops import Routing
from setpoint.engine.layers.attention import PagedAttention
from setpoint.engine.layers.experts import SparseMLP
from setpoint.engine.layers.mlp import GatedMLP
from setpoint.engine.layers.module import Layer
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


def glm4_moe(spec: ModelSpec, config: ConfigReader) -> CausalLM:
    """GLM-4.5: the attention of Qwen3 with a partial rotation, the mixture of DeepSeek-V3."""
    eps, bias = config.number("rms_norm_eps", 1e-5), config.flag("attention_bias")
    config.number("partial_rotary_factor", 0.5)
    norm = (lambda size: RMSNorm(size, eps)) if config.flag("use_qk_norm") else None
    mlp = deepseek_mlps(spec, config, corrected_routing(spec, config))

    def layer(index: int) -> PreNormLayer:
        attend = PagedAttention(index, spec.head_dim)
        attention = SelfAttention(spec, attend, qkv_bias=bias, head_norm=norm)
        return PreNormLayer(spec, eps, attention, mlp(index))

    layers = map(layer, range(spec.num_layers))
    return causal_lm(spec, eps, layers, unused=config.further_layers(spec))


def corrected_routing(spec: ModelSpec, config: ConfigReader) -> Routing:
    """The router of DeepSeek-V3 and GLM-4.5: sigmoids, corrected for the choice, in groups that
    are judged by their two best experts."""
    for key in ("scoring_func", "moe_router_activation", "moe_router_activation_func"):
        config.choice(key, "sigmoid")
    config.choice("topk_method", "noaux_tc")
    return grouped(
        config,
        Routing(
            config.mixture(spec).num_chosen,
            "sigmoid",
            normalise=config.flag("norm_topk_prob", default=True),
            scaling=config.number("routed_scaling_factor", 1.0),
            num_best=2,
        ),
        config.mixture(spec).num_experts,
    )


def grouped(config: ConfigReader, routing: Routing, num_experts: int) -> Routing:
    """The same router with the groups that the config asks for."""
    groups, opened = config.count("n_group", 1, low=1), config.count("topk_group", 1, low=1)
    if num_experts % groups:
        config.refuse("n_group", f"it must divide the {num_experts} experts evenly")
    size = num_experts // groups
    if groups > 1 and size < routing.num_best:
        config.refuse("n_group", f"a group must have at least {routing.num_best} experts")
    if opened > groups:
        config.refuse("topk_group", f"there are {groups} groups (n_group)")
    if opened * size < routing.num_chosen:
        config.refuse("topk_group", f"they have fewer than {routing.num_chosen} experts")
    return replace(routing, num_groups=groups, num_open=opened)


def deepseek_mlps(
    spec: ModelSpec, config: ConfigReader, routing: Routing
) -> Callable[[int], Layer]:
    """Layer -> its MLP: experts, of which some are shared, or one dense MLP."""
    gated, mixture = config.gated(), config.mixture(spec)

    def mlp(index: int) -> Layer:
        if index not in mixture.layers:
            return GatedMLP(spec.hidden_size, spec.intermediate_size, gated)
        return SparseMLP(spec.hidden_size, mixture, gated, routing, shared="shared_experts")

    return mlp


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
