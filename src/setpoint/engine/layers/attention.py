"""Self-attention between the projections: rotates q and k, stores a token's parts of the cache in
the pool, and attends over it."""

from __future__ import annotations

from dataclasses import replace

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

    def take_scales(self, k_scale: float, v_scale: float) -> None:
        """Store K and V in a cache in fp8 divided by these."""
        self.variant = replace(self.variant, k_scale=k_scale, v_scale=v_scale)

    def take_sinks(self, sinks: torch.Tensor) -> int:
        """Give each head its sink, [H]. Returns the bytes that they take."""
        sinks = sinks.to(torch.promote_types(sinks.dtype, torch.float32))
        self.variant = replace(self.variant, sinks=sinks)
        return sinks.nbytes

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        k_cache, v_cache = ctx.kv[self.layer]
        batch, variant = ctx.batches[self.layer], self.variant
        q = ctx.ops.rope_and_store(
            q,
            k,
            v,
            ctx.cos_sin[self.rotary],
            batch.positions,
            k_cache,
            v_cache,
            batch.kv_index,
            variant.k_scale,
            variant.v_scale,
        )
        return ctx.attention.forward(q, k_cache, v_cache, batch, variant).flatten(1)


class LatentAttention(Layer):
    """Attention over latent vectors (decision 0066), with one head of K, the cached vector, and V,
    its first ``rank`` numbers: q_latent [T, H, rank], q_rope [T, H, P], latent [T, rank], k_rope
    [T, P] -> [T, H, rank]. What may be strided: ``Ops.rope_and_store_latent``.

    interleaved: the rotation pairs neighbouring dimensions.
    """

    def __init__(self, layer: int, rank: int, scale: float, *, interleaved: bool) -> None:
        super().__init__()
        self.layer = layer
        self.variant = AttentionVariant(scale)
        self._rank = rank
        self._interleaved = interleaved

    def take_scales(self, k_scale: float, v_scale: float) -> None:
        """Store the vectors in a cache in fp8 divided by k_scale. V, a part of them, has no other
        scale."""
        self.variant = replace(self.variant, k_scale=k_scale, v_scale=k_scale)

    def forward(
        self,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        latent: torch.Tensor,
        k_rope: torch.Tensor,
        ctx: ForwardContext,
    ) -> torch.Tensor:
        (cache,) = ctx.kv[self.layer]
        batch = ctx.batches[self.layer]
        q = ctx.ops.rope_and_store_latent(
            q_latent,
            q_rope,
            latent,
            k_rope,
            ctx.cos_sin[0],
            batch.positions,
            cache,
            batch.kv_index,
            self.variant.k_scale,
            interleaved=self._interleaved,
        )
        return ctx.attention.forward(q, cache, cache[..., : self._rank], batch, self.variant)


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
    k_cache, v_cache = ctx.kv[layer]
    batch = ctx.batches[layer]
    store(k, k_cache, batch.kv_index, variant.k_scale)
    store(v, v_cache, batch.kv_index, variant.v_scale)
    return ctx.attention.forward(q, k_cache, v_cache, batch, variant)
