"""The projections around latent attention (decision 0066)."""

from __future__ import annotations

import torch

from setpoint.core.model import Latent, ModelSpec
from setpoint.engine.layers.attention import LatentAttention
from setpoint.engine.layers.context import Backends, ForwardContext
from setpoint.engine.layers.linear import Linear, Undivided
from setpoint.engine.layers.module import Layer
from setpoint.engine.layers.norm import RMSNorm
from setpoint.engine.parallel.group import head_spans
from setpoint.engine.quant.heads import of_heads
from setpoint.engine.quant.linear_method import LinearMethod, PackedWeight

NORM_EPS = 1e-6
"""Epsilon of the norms of latent vectors, whatever rms_norm_eps is (transformers'
DeepseekV3Attention)."""


class UpProjection(Linear):
    """kv_b_proj, which makes K and V of each head from a latent vector. Its two halves are
    multiplied from other sides instead: ``absorb`` takes a query to the latent space, ``expand``
    takes a sum of latent vectors to values. It is not quantised."""

    is_exact = True
    _absorb: PackedWeight
    _expand: PackedWeight

    def __init__(self, latent: Latent, num_heads: int) -> None:
        super().__init__(latent.rank, num_heads * latent.up_size)
        self._latent = latent

    def finish_loading(self, method: LinearMethod) -> int:
        assert self.weight is not None, "loaded twice"
        heads = self.weight.data.unflatten(0, (-1, self._latent.up_size))
        key_size = self._latent.key_size
        self._absorb = of_heads(
            [method.pack(head[:key_size].t().contiguous(), None) for head in heads]
        )
        self._expand = of_heads([method.pack(head[key_size:].clone(), None) for head in heads])
        self.weight = None
        return self._absorb.num_bytes + self._expand.num_bytes

    def absorb(self, q: torch.Tensor, backends: Backends) -> torch.Tensor:
        """[T, H, key_size], which may be strided -> [T, H, rank]."""
        return backends.multiply(self._absorb, q)

    def expand(self, latent: torch.Tensor, backends: Backends) -> torch.Tensor:
        """[T, H, rank] -> [T, H, value_size]."""
        return backends.multiply(self._expand, latent)


class LatentSelfAttention(Layer):
    """x [T, C] -> [T, C]. bias: whether the projections to the latent spaces, and that of the
    output, have biases."""

    def __init__(self, spec: ModelSpec, attend: LatentAttention, *, bias: bool) -> None:
        super().__init__()
        assert spec.latent is not None
        latent = self._latent = spec.latent
        self._num_heads = spec.num_heads
        q_size, hidden = spec.num_heads * latent.query_size, spec.hidden_size
        if latent.q_rank:
            self.q_a_proj = Undivided(hidden, latent.q_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(latent.q_rank, NORM_EPS)
            self.q_b_proj = Linear(latent.q_rank, q_size)
        else:
            self.q_proj = Linear(hidden, q_size)
        self.kv_a_proj_with_mqa = Undivided(hidden, latent.rank + latent.rope_size, bias=bias)
        self.kv_a_layernorm = RMSNorm(latent.rank, NORM_EPS)
        self.kv_b_proj = UpProjection(latent, spec.num_heads)
        self.attend = attend
        self.o_proj = Linear(
            spec.num_heads * latent.value_size, hidden, bias=bias, divides_inputs=True
        )
        self.widths: tuple[int, ...] = ()
        """Size of all heads' values of each rank; written by ``split``."""

    def split(self, rank: int, size: int) -> None:
        """Compute only the heads of one of ``size`` ranks."""
        of_ranks = [q for q, _ in head_spans(self._num_heads, 1, size)]

        def rows(each: int) -> list[tuple[int, int]]:
            return [(begin * each, end * each) for begin, end in of_ranks]

        latent = self._latent
        queries = self.q_b_proj if latent.q_rank else self.q_proj
        queries.spans = {"": rows(latent.query_size)}
        self.kv_b_proj.spans = {"": rows(latent.up_size)}
        self.o_proj.input_spans = rows(latent.value_size)
        self.widths = tuple(end - begin for begin, end in self.o_proj.input_spans)

    def forward(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        latent = self._latent
        q = self._queries(x, ctx).view(len(x), -1, latent.query_size)
        kv = self.kv_a_proj_with_mqa(x, ctx)
        out = self.attend(
            self.kv_b_proj.absorb(q[..., : latent.key_size], ctx),
            q[..., latent.key_size :],
            self.kv_a_layernorm(kv[:, : latent.rank], None, ctx.ops)[0],
            kv[:, latent.rank :],
            ctx,
        )
        values = self.kv_b_proj.expand(out, ctx).flatten(1)
        return self.o_proj.of_shares(values, self.widths, ctx)

    def _queries(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """[T, H · query_size]."""
        if not self._latent.q_rank:
            return self.q_proj(x, ctx)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x, ctx), None, ctx.ops)[0], ctx)
