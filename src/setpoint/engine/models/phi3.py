"""The dense models Phi-3, Phi-3.5 and Phi-4: Llama's arithmetic with projections that are stored
stacked."""

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


def phi3(spec: ModelSpec, config: ConfigReader) -> CausalLM:
    eps, gated, windows = (
        config.number("rms_norm_eps", 1e-5),
        config.gated(),
        config.windows(spec, "sliding_window"),
    )
    config.number("partial_rotary_factor", 1.0)  # RotaryEmbedding reads and applies it

    def layer(index: int) -> PreNormLayer:
        attention = SelfAttention(spec, PagedAttention(index, spec.head_dim, window=windows[index]))
        return PreNormLayer(
            spec, eps, attention, GatedMLP(spec.hidden_size, spec.intermediate_size, gated)
        )

    model = causal_lm(spec, eps, map(layer, range(spec.num_layers)))
    if model.rotaries[0].kind not in ("default", "longrope"):
        config.refuse("rope_scaling", "this architecture supports only the type longrope")
    return model
