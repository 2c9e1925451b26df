"""Gemma 2 and Gemma 3 (text): norms before and after each branch, local layers that see a window,
and global ones that see all positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from setpoint.core.model import ModelSpec
from setpoint.engine.layers.attention import PagedAttention
from setpoint.engine.layers.context import ForwardContext
from setpoint.engine.layers.mlp import GatedMLP
from setpoint.engine.layers.module import Layer
from setpoint.engine.layers.norm import RMSNorm
from setpoint.engine.layers.rotary import RotaryEmbedding
from setpoint.engine.layers.token_embedding import Embedding
from setpoint.engine.models.decoder import CausalLM, Decoder, SelfAttention, head
from setpoint.engine.models.model_config import ConfigReader

GELU = "gelu_pytorch_tanh"


class GemmaLayer(Layer):
    """A norm before and after each of the two branches. The residual addition is fused with the
    norm that follows it."""

    def __init__(
        self, spec: ModelSpec, norm: Callable[[int], Layer], attention: Layer, mlp: Layer
    ) -> None:
        super().__init__()
        self.input_layernorm = norm(spec.hidden_size)
        self.self_attn = attention
        self.post_attention_layernorm = norm(spec.hidden_size)
        self.pre_feedforward_layernorm = norm(spec.hidden_size)
        self.mlp = mlp
        self.post_feedforward_layernorm = norm(spec.hidden_size)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.input_layernorm(x, residual, ctx.ops)
        x = self.post_attention_layernorm(self.self_attn(x, ctx), None, ctx.ops)[0]
        x, residual = self.pre_feedforward_layernorm(x, residual, ctx.ops)
        return self.post_feedforward_layernorm(self.mlp(x, ctx), None, ctx.ops)[0], residual


def gemma2(spec: ModelSpec, config: ConfigReader) -> CausalLM:
    """Gemma 2: every other layer is local, and attention scores are capped."""
    rotaries = [RotaryEmbedding.from_config(spec.config, spec.head_dim)]
    return _gemma(spec, config, rotaries, softcap=config.number_or_none("attn_logit_softcapping"))


def gemma3(spec: ModelSpec, config: ConfigReader) -> CausalLM:
    """Gemma 3: all layers except every sixth are local and rotate with a theta of their own; q and
    k are normalised."""
    rotaries = [
        RotaryEmbedding.from_config(rope, spec.head_dim) for rope in _ropes(spec.config, config)
    ]
    return _gemma(spec, config, rotaries, head_norm=True)


def _gemma(
    spec: ModelSpec,
    config: ConfigReader,
    rotaries: Sequence[RotaryEmbedding],
    *,
    softcap: float | None = None,
    head_norm: bool = False,
) -> CausalLM:
    """rotaries: that of the global layers, then that of the local ones if it is another. softcap:
    cap of the attention scores."""
    eps, gated, bias = (
        config.number("rms_norm_eps", 1e-6),
        config.gated("hidden_activation", GELU),
        config.flag("attention_bias"),
    )
    scale = config.number("query_pre_attn_scalar", 256) ** -0.5
    windows = config.windows(spec, "sliding_window", "layer_types")

    def norm(size: int) -> RMSNorm:
        return RMSNorm(size, eps, offset=1.0)

    def layer(index: int) -> GemmaLayer:
        window = windows[index]
        rotary = 0 if window is None else len(rotaries) - 1
        attend = PagedAttention(
            index, spec.head_dim, scale=scale, softcap=softcap, window=window, rotary=rotary
        )
        attention = SelfAttention(
            spec, attend, qkv_bias=bias, out_bias=bias, head_norm=norm if head_norm else None
        )
        return GemmaLayer(
            spec, norm, attention, GatedMLP(spec.hidden_size, spec.intermediate_size, gated)
        )

    embed_tokens = Embedding(spec.vocab_size, spec.hidden_size, scale=spec.hidden_size**0.5)
    model = Decoder(embed_tokens, map(layer, range(spec.num_layers)), norm(spec.hidden_size))
    return CausalLM(
        rotaries,
        model,
        head(spec, embed_tokens),
        softcap=config.number_or_none("final_logit_softcapping"),
    )


def _ropes(keys: Mapping[str, Any], config: ConfigReader) -> list[dict[str, Any]]:
    """The rotations of Gemma 3's global layers and of its local layers, as configs for
    ``RotaryEmbedding.from_config``.

    Newer configs have a section per kind of layer; in older ones rope_scaling concerns the global
    layers only.
    """
    thetas = {
        "full_attention": config.number("rope_theta", 1e6),
        "sliding_attention": config.number("rope_local_base_freq", 1e4),
    }
    sections = keys.get("rope_parameters") or {"full_attention": keys.get("rope_scaling")}
    if not sections.keys() <= thetas.keys() or not all(
        section is None or isinstance(section, Mapping) for section in sections.values()
    ):
        config.refuse("rope_parameters", f"it must have sections {' and '.join(thetas)}")
    length = keys["max_position_embeddings"]
    return [
        {
            "max_position_embeddings": length,
            "rope_theta": theta,
            "rope_parameters": sections.get(kind),
        }
        for kind, theta in thetas.items()
    ]
