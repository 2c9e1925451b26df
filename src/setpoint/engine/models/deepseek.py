"""DeepSeek-V2, and DeepSeek-V3, R1 and Kimi K2: latent attention (decision 0066) and a mixture with
shared experts."""

from __future__ import annotations

import math

from setpoint.core.model import ModelSpec
from setpoint.engine.kernels.ops import Routing
from setpoint.engine.layers.attention import LatentAttention
from setpoint.engine.layers.latent import LatentSelfAttention
from setpoint.engine.layers.rotary import RotaryEmbedding
from setpoint.engine.models.decoder import CausalLM, PreNormLayer, causal_lm
from setpoint.engine.models.mixtures import corrected_routing, deepseek_mlps, grouped
from setpoint.engine.models.model_config import ConfigReader

GREEDY, OF_GROUPS = "greedy", "group_limited_greedy"


def deepseek_v2(spec: ModelSpec, config: ConfigReader) -> CausalLM:
    config.choice("scoring_func", "softmax")
    if config.flag("norm_topk_prob"):
        config.refuse("norm_topk_prob", "transformers and DeepSeek's own code differ there")
    mixture = config.mixture(spec)
    routing = Routing(mixture.num_chosen, scaling=config.number("routed_scaling_factor", 1.0))
    if config.choice("topk_method", GREEDY, OF_GROUPS) == OF_GROUPS:
        routing = grouped(config, routing, mixture.num_experts)
    else:
        config.count("n_group", 1)  # has no effect
    return _deepseek(spec, config, routing, interleaved=True)


def deepseek_v3(spec: ModelSpec, config: ConfigReader) -> CausalLM:
    interleaved = config.flag("rope_interleave", default=True)
    return _deepseek(spec, config, corrected_routing(spec, config), interleaved=interleaved)


def _deepseek(
    spec: ModelSpec, config: ConfigReader, routing: Routing, *, interleaved: bool
) -> CausalLM:
    eps, bias = config.number("rms_norm_eps", 1e-6), config.flag("attention_bias")
    latent, mlp = config.latent(spec), deepseek_mlps(spec, config, routing)
    scale = latent.query_size**-0.5 * _sharpening(spec)

    def layer(index: int) -> PreNormLayer:
        attend = LatentAttention(index, latent.rank, scale, interleaved=interleaved)
        return PreNormLayer(spec, eps, LatentSelfAttention(spec, attend, bias=bias), mlp(index))

    layers = map(layer, range(spec.num_layers))
    return causal_lm(spec, eps, layers, unused=config.further_layers(spec))


def _sharpening(spec: ModelSpec) -> float:
    """The factor on scores that a stretched context asks for (YaRN's mscale_all_dim, squared: once
    for q and once for k)."""
    rotary = RotaryEmbedding.from_config(spec.config, spec.rope_dim)
    weight = rotary.mscale("mscale_all_dim")
    if rotary.kind == "default" or weight is None:
        return 1.0
    factor = rotary.number("factor")
    return (0.1 * weight * math.log(factor) + 1.0) ** 2 if factor > 1 else 1.0
