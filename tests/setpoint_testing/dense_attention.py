"""An attention backend that reads tensors only, by looking at every position of the page table: for
tests of captured graphs with small contexts."""

from __future__ import annotations

import torch

from setpoint.engine.attention.attention_backend import (
    AttentionBatch,
    AttentionShape,
    AttentionVariant,
)


class DenseAttention:
    """Implements ``attention.attention_backend.AttentionBackend``."""

    is_capturable = True

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape

    def prepare(self, batch: AttentionBatch) -> None:
        """Nothing: every call looks at everything."""

    def forward(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        variant: AttentionVariant,
    ) -> torch.Tensor:
        num_tokens, num_heads, _ = q.shape
        group = num_heads // k_cache.shape[2]
        token = torch.arange(num_tokens)
        row = torch.searchsorted(batch.cu_q[1:].contiguous(), token, right=True)
        row = row.clamp(max=len(batch.slots) - 1)
        position = torch.arange(batch.page_table.shape[1] * self._shape.page_size)
        pages = batch.page_table[batch.slots[row].long()].repeat_interleave(
            self._shape.page_size, dim=1
        )
        sees = (position <= batch.positions[:, None]) & (token < batch.cu_q[-1])[:, None]
        if variant.window is not None:
            sees &= position > batch.positions[:, None] - variant.window
        # Pages that are not seen are not read: their entries are undefined.
        index = torch.where(sees, pages.long(), 0) * self._shape.page_size
        index = torch.where(sees, index + position % self._shape.page_size, 0)
        keys, values = (
            torch.where(sees[:, :, None, None], cache.flatten(0, 1)[index].double(), 0.0)
            .repeat_interleave(group, dim=2)
            .permute(0, 2, 1, 3)
            for cache in (k_cache, v_cache)
        )
        scores = (keys @ q.double().unsqueeze(-1)).squeeze(-1) * variant.scale
        if variant.softcap is not None:
            scores = torch.tanh(scores / variant.softcap) * variant.softcap
        scores = scores.masked_fill(~sees[:, None], -torch.inf)
        if variant.sinks is not None:
            sinks = variant.sinks.double()[None, :, None].expand(num_tokens, -1, 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)[..., : len(position)]
        return (weights.unsqueeze(2) @ values).squeeze(2).to(q.dtype)
