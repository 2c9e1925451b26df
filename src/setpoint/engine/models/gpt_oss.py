"""gpt-oss: attention with sinks, every other layer over a window, and experts with biases and a
clamped SwiGLU."""

from __future__ import annotations

from setpoint.core.model import ModelSpec
from setpoint.engine.kernels.ops import SILU, GateActivation, Routing
from setpoint.engine.layers.attention import PagedAttention
from setpoint.engine.layers.experts import SparseMLP
from setpoint.engine.models.decoder import CausalLM, PreNormLayer, SelfAttention, causal_lm
from setpoint.engine.models.model_config import ELSEWHERE, ConfigReader


def gpt_oss(spec: ModelSpec, config: ConfigReader) -> CausalLM:
    eps, bias = config.number("rms_norm_eps", 1e-5), config.flag("attention_bias", default=True)
    windows = config.windows(spec, "sliding_window", "layer_types")
    if config.gated() is not SILU:
        config.refuse("hidden_act", f"the experts' gate is a SwiGLU; {ELSEWHERE}")
    limits = config.number("swiglu_alpha", 1.702), config.number("swiglu_limit", 7.0)
    gated, mixture = GateActivation("clamped_swiglu_mul", limits), config.mixture(spec)
    routing = Routing(mixture.num_chosen, "softmax_of_chosen")

    def layer(index: int) -> PreNormLayer:
        attend = PagedAttention(index, spec.head_dim, window=windows[index])
        attention = SelfAttention(spec, attend, qkv_bias=bias, out_bias=bias, sinks=True)
        mlp = SparseMLP(spec.hidden_size, mixture, gated, routing, router="router", bias=True)
        return PreNormLayer(spec, eps, attention, mlp)

    model = causal_lm(spec, eps, map(layer, range(spec.num_layers)))
    model.fused_experts = True
    return model
