"""Self-attention between the projections: rotates q and k, stores K and V in the pool, and attends
over it."""

from __future__ import annotations

import torch

from setpoint.engine.attention.attention_backend import AttentionVariant
from setpoint.engine.kernels.ref import store
from setpoint.engine.layers.context import ForwardContext
from setpoint.engine.layers.module import Layer


class PagedAttention(Layer):
    """q [T, H, D], k and v [T, Hkv, D] (token rows may be strided) -> [T, H D].

    layer: selects the layer's cache. scale: by default 1 / sqrt(head_dim). softcap, window: see
    ``AttentionVariant``. rotary: index into the model's ``rotaries``.
    """

    def __init__(
        self,
        layer: int,
        head_dim: int,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        window: int | None = None,
        rotary: int = 0,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.rotary = rotary
        self.variant = AttentionVariant(head_dim**-0.5 if scale is None else scale, softcap, window)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        k_cache, v_cache = ctx.kv[self.layer]
        batch = ctx.batches[self.layer]
        q = ctx.ops.rope_and_store(
            q, k, v, ctx.cos_sin[self.rotary], batch.positions, k_cache, v_cache, batch.kv_index
        )
        return ctx.attention.forward(q, k_cache, v_cache, batch, self.variant).flatten(1)


def store_and_attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ctx: ForwardContext,
    layer: int,
    variant: AttentionVariant,
) -> torch.Tensor:
    """q [T, H, D], k and v [T, Hkv, D] -> [T, H, D]. q and k are already rotated, or are not to be
    rotated."""
    (k_cache, v_cache), batch = ctx.kv[layer], ctx.batches[layer]
    store(k, k_cache, batch.kv_index)
    store(v, v_cache, batch.kv_index)
    return ctx.attention.forward(q, k_cache, v_cache, batch, variant)
