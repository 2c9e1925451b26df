"""Reference operations in torch, for every device and dtype: they define the results that faster
kernels are tested against."""

from __future__ import annotations

import torch

from setpoint.engine.kernels.ops import Routing

LEAST_SUM = 1e-20
"""Added to the sum that weights are divided by, so that scores of zero give weights of zero."""


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic: fp32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


SUM_BLOCK = 256
"""Logits that are summed together, when a log softmax is made of sums of blocks."""


def log_sum_exp(logits: torch.Tensor) -> torch.Tensor:
    """See ``Ops.log_sum_exp``. The order of the sum depends on V alone. torch divides the sum of a
    single long row among its threads, but never one of several sums, so the blocks are summed
    first."""
    highest = logits.amax(dim=-1, keepdim=True)
    # A row without a finite logit has no highest one to subtract.
    highest = torch.where(highest.isfinite(), highest, torch.zeros_like(highest))
    weights = (logits - highest).exp()
    in_blocks = logits.shape[1] // SUM_BLOCK * SUM_BLOCK
    blocks = weights[:, :in_blocks].unflatten(1, (-1, SUM_BLOCK)).sum(dim=-1)
    rest = weights[:, in_blocks:].sum(dim=-1, keepdim=True)
    return (blocks.sum(dim=-1, keepdim=True) + rest).log() + highest


class RefOps:
    """Implements ``kernels.ops.Ops``."""

    sampling = None

    def place_tokens(
        self,
        slots: torch.Tensor,
        cu_q: torch.Tensor,
        kv_lens: torch.Tensor,
        known: torch.Tensor,
        page_table: torch.Tensor,
        page_size: int,
        num_tokens: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        token = torch.arange(num_tokens, device=slots.device)
        row = torch.searchsorted(cu_q[1:].contiguous(), token, right=True).clamp(max=len(slots) - 1)
        slot, shift = slots[row], (kv_lens - cu_q[1:])[row]
        is_placed = token < cu_q[-1]
        positions = torch.where(is_placed, token + shift, 0)
        page = page_table[slot, positions // page_size].long()
        index = torch.where(is_placed, page * page_size + positions % page_size, 0)
        ids = torch.where(is_placed, known[slot, positions], 0)
        return ids, torch.where(is_placed, positions, -1), index

    def best_tokens(self, logits: torch.Tensor) -> torch.Tensor:
        # The maximum is NaN, inf or -inf exactly when no token can be chosen, so the check needs no
        # pass of its own over the logits.
        best, ids = logits.max(dim=-1)
        return ids.where(best.isfinite(), -1)

    def top_tokens(self, logits: torch.Tensor, count: int) -> torch.Tensor:
        if logits.dtype == torch.float64:
            return logits.sort(dim=-1, descending=True, stable=True).indices[:, :count]
        # topk does not define the order of equal values, so every token gets a key of its own: the
        # logit's bits as an integer in the same order, then the index, counted from the end. Adding
        # zero turns -0 into 0.
        bits = (logits.float() + 0.0).view(torch.int32)
        ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
        from_end = torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device)
        keys = ((ordered << 32) | from_end).topk(count, dim=-1).values
        return logits.shape[1] - 1 - (keys & 0xFFFFFFFF)

    log_sum_exp = staticmethod(log_sum_exp)

    def mask_tokens(self, logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
        bits = (words.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1
        allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
        logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)

    def soft_cap(self, logits: torch.Tensor, cap: float) -> torch.Tensor:
        return logits.copy_((logits.to(_wide(logits.dtype)) / cap).tanh_().mul_(cap))

    def embedding(self, ids: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
        rows = weight[ids]
        return rows if scale == 1.0 else rows.mul_(torch.tensor(scale).to(rows.dtype))

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
    ) -> torch.Tensor:
        wide = x.to(_wide(x.dtype))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
        return (wide * scale).mul_(weight.to(wide.dtype) + offset).to(x.dtype)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        offset: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = x + residual
        return self.rms_norm(residual, weight, eps, offset), residual

    def rope_and_store(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        kv_index: torch.Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> torch.Tensor:
        q, k = self.rotate(q, k, cos_sin, positions)
        store(k, k_cache, kv_index, k_scale)
        store(v, v_cache, kv_index, v_scale)
        return q

    def rotate(
        self, q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated q and k, as in ``rope_and_store``."""
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
        return _rotate(q, cos, sin), _rotate(k, cos, sin)

    def rope_and_store_latent(
        self,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        latent: torch.Tensor,
        k_rope: torch.Tensor,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        cache: torch.Tensor,
        kv_index: torch.Tensor,
        scale: float = 1.0,
        *,
        interleaved: bool,
    ) -> torch.Tensor:
        q, k = q_rope, k_rope.unsqueeze(1)
        if interleaved:
            q, k = (x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (q, k))
        q, k = self.rotate(q, k, cos_sin, positions)
        store(torch.cat((latent.unsqueeze(1), k), dim=-1), cache, kv_index, scale)
        return torch.cat((q_latent, q), dim=-1)

    def route(
        self, logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = logits.to(_wide(logits.dtype))
        if routing.scoring != "softmax_of_chosen":
            scores = scores.sigmoid() if routing.scoring == "sigmoid" else scores.softmax(-1)
        ids = _choose(scores if correction is None else scores + correction, routing)
        weights = scores.gather(-1, ids)
        if routing.scoring == "softmax_of_chosen":
            weights = weights.softmax(-1)
        if routing.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)
        has_nan = logits.isnan().any(-1, keepdim=True)
        weights = (weights * routing.scaling).masked_fill(has_nan, torch.nan)
        return ids.int(), weights

    def place_experts(
        self,
        ids: torch.Tensor,
        load: torch.Tensor,
        positions: torch.Tensor | None,
        places: torch.Tensor | None = None,
    ) -> torch.Tensor:
        slots = ids
        if places is not None:
            assert positions is not None
            rows = places[ids.long()]
            index = 1 + positions[:, None] % rows[..., 0]
            slots = rows.gather(2, index[..., None])[..., 0]
        pairs = slots.flatten().long()
        counted = torch.ones_like(ids) if positions is None else (positions >= 0).unsqueeze(1)
        load.index_add_(0, pairs, counted.expand_as(ids).flatten().to(load.dtype))
        return slots

    def combine(
        self,
        parts: torch.Tensor,
        weights: torch.Tensor,
        shared: torch.Tensor | None = None,
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        wide = _wide(parts.dtype)
        each = parts.view(*weights.shape, -1).to(wide)
        out = each[:, 0] * weights[:, 0, None].to(wide)
        for index in range(1, weights.shape[1]):
            out += each[:, index] * weights[:, index, None].to(wide)
        if shared is not None:
            out += shared.to(wide) * (1 if gate is None else gate.to(wide).sigmoid())
        return out.to(parts.dtype)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.to(_wide(gate_up.dtype)).chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)

    def gelu_tanh_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.to(_wide(gate_up.dtype)).chunk(2, dim=-1)
        return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)

    def clamped_swiglu_mul(self, gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
        gate, up = gate_up.to(_wide(gate_up.dtype)).chunk(2, dim=-1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (gate * (gate * alpha).sigmoid() * (up + 1)).to(gate_up.dtype)


def _choose(scores: torch.Tensor, routing: Routing) -> torch.Tensor:
    """The ids [T, num_chosen] of the experts with the largest scores [T, E] in the open groups."""
    if routing.num_groups > 1:
        groups = scores.unflatten(-1, (routing.num_groups, -1))
        best = groups.sort(dim=-1, descending=True).values[..., : routing.num_best].sum(-1)
        order = best.sort(dim=-1, descending=True, stable=True).indices
        closed = torch.ones_like(best, dtype=torch.bool)
        closed = closed.scatter(-1, order[:, : routing.num_open], value=False)
        scores = groups.masked_fill(closed.unsqueeze(-1), -torch.inf).flatten(1)
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    return order[:, : routing.num_chosen].contiguous()


def store(
    new: torch.Tensor, cache: torch.Tensor, kv_index: torch.Tensor, scale: float = 1.0
) -> None:
    """Write a step's K or V [T, Hkv, D] to their places in the cache, as in
    ``Ops.rope_and_store``."""
    if cache.dtype.itemsize == 1:
        largest = torch.finfo(cache.dtype).max
        if scale != 1.0:
            new = new.to(_wide(new.dtype))
            new = new / new.new_full((), scale)  # by a number, some devices multiply by its inverse
        new = new.clamp(-largest, largest)
    cache.view(-1, *cache.shape[2:])[kv_index] = new.to(cache.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D], cos and sin [T, 1, R/2] -> [T, heads, D]: (a, b) becomes (a cos - b sin, b
    cos + a sin), where a and b are the halves of the first R of the D dimensions."""
    half = cos.shape[-1]
    first, second, rest = x.to(cos.dtype).split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(
        x.dtype
    )


def create(dtype: torch.dtype) -> RefOps:
    """The reference, which runs everywhere."""
    return RefOps()
