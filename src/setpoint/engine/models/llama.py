"""The Llama family (Llama 2 and 3.x, SmolLM2): a declaration over the shared layers.

The module tree carries the checkpoint's names, so that the weight map is the tree itself plus the stacked projections
(``Linear.parts``). C: hidden size, T: tokens of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from setpoint.core.errors import CheckpointError
from setpoint.core.model import ModelSpec
from setpoint.engine.layers.attention import PagedAttention
from setpoint.engine.layers.base import Layer
from setpoint.engine.layers.context import ForwardContext
from setpoint.engine.layers.embedding import Embedding
from setpoint.engine.layers.linear import Linear, TiedHead
from setpoint.engine.layers.norm import RMSNorm
from setpoint.engine.layers.rotary import RotaryEmbedding

DEFAULT_EPS = 1e-6


class SelfAttention(Layer):
    def __init__(self, layer: int, spec: ModelSpec) -> None:
        super().__init__()
        bias = bool(spec.config.get("attention_bias", False))
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.qkv_proj = Linear(spec.hidden_size, {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}, bias=bias)
        self.attend = PagedAttention(layer, spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self.o_proj = Linear(q_size, spec.hidden_size, bias=bias)

    def forward(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        return self.o_proj(self.attend(self.qkv_proj(x), ctx))


class MLP(Layer):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        bias = bool(spec.config.get("mlp_bias", False))
        size = spec.intermediate_size
        self.gate_up_proj = Linear(spec.hidden_size, {"gate_proj": size, "up_proj": size}, bias=bias)
        self.down_proj = Linear(size, spec.hidden_size, bias=bias)

    def forward(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        return self.down_proj(ctx.ops.silu_mul(self.gate_up_proj(x)))


class DecoderLayer(Layer):
    def __init__(self, layer: int, spec: ModelSpec, eps: float) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, eps)
        self.self_attn = SelfAttention(layer, spec)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, eps)
        self.mlp = MLP(spec)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None, ctx: ForwardContext) -> tuple[torch.Tensor, torch.Tensor]:
        """The branch output x and the residual stream stay apart, so that each addition is fused with the next norm."""
        x, residual = self.input_layernorm(x, residual, ctx.ops)
        x = self.self_attn(x, ctx)
        x, residual = self.post_attention_layernorm(x, residual, ctx.ops)
        return self.mlp(x, ctx), residual


class Decoder(Layer):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        eps = float(spec.config.get("rms_norm_eps", DEFAULT_EPS))
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(layer, spec, eps) for layer in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, eps)

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        x, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            x, residual = layer(x, residual, ctx)
        return self.norm(x, residual, ctx.ops)[0]


class Llama(Layer):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        _check(spec.config)
        self.rotary = RotaryEmbedding.from_config(spec.config, spec.head_dim)
        self.model = Decoder(spec)
        self.lm_head = TiedHead(self.model.embed_tokens) if spec.tie_embeddings else Linear(spec.hidden_size, spec.vocab_size)

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """input_ids [T] -> the last hidden states [T, C], normalised."""
        return self.model(input_ids, ctx)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, C] -> [S, V]."""
        return self.lm_head(hidden)


def _check(config: Mapping[str, Any]) -> None:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(f"Activation {activation!r} is not supported for this architecture; supported: silu.")
