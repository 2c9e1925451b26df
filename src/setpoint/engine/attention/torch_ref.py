"""Reference attention in plain torch: it defines the result that every other backend is tested
against. Runs on every device.

It loops over the rows and gathers each row's K and V from its pages, so that a row cannot see
anything else in the batch. ``prepare`` keeps the rows' lengths as the host knows them, so
``forward`` never waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from setpoint.core.limits import REFERENCE_SCORES
from setpoint.engine.attention.attention_backend import (
    AttentionBatch,
    AttentionShape,
    AttentionVariant,
)


@dataclass(slots=True, frozen=True)
class Rows:
    """The rows of one step on the pages of one cache group."""

    bounds: list[int]
    """[n + 1], ``AttentionBatch.cu_q``."""
    kv_lens: list[int]
    tables: torch.Tensor
    """[n, pages of the longest row]: each row's pages."""


class TorchRefAttention:
    """Implements ``attention.attention_backend.AttentionBackend``."""

    is_capturable = False

    def __init__(self, shape: AttentionShape) -> None:
        self.wide = torch.promote_types(shape.dtype, torch.float32)
        self._page_size = shape.page_size
        self._rows: dict[int, Rows] = {}
        """Cache group -> the rows of this step."""

    def prepare(self, batch: AttentionBatch) -> None:
        width = -(-int(batch.kv_lens_host.max()) // self._page_size)
        self._rows[batch.group] = Rows(
            batch.cu_q_host.tolist(),
            batch.kv_lens_host.tolist(),
            # This reads the pages of all rows at once. ``page_table[slots[row]]`` would read the
            # slot back: indexing with a 0-dimensional tensor makes the host wait for the device.
            batch.page_table[batch.slots, :width],
        )

    def forward(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        variant: AttentionVariant,
    ) -> torch.Tensor:
        out = q.new_empty((*q.shape[:2], v_cache.shape[-1]))
        rows = self._rows[batch.group]
        for row, kv_len in enumerate(rows.kv_lens):
            begin, end = rows.bounds[row], rows.bounds[row + 1]
            pages = rows.tables[row, : -(-kv_len // self._page_size)]
            keys, values = (
                cache[pages].flatten(0, 1)[:kv_len].to(self.wide) for cache in (k_cache, v_cache)
            )
            block = max(1, REFERENCE_SCORES // (q.shape[1] * kv_len))
            for first in range(begin, end, block):
                last = min(first + block, end)
                # Token t of the row has position kv_len - (end - t): the row's tokens are its last
                # ones.
                out[first:last] = self._row(
                    q[first:last], keys, values, kv_len - (end - first), variant
                )
        return out

    def _row(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        start: int,
        variant: AttentionVariant,
    ) -> torch.Tensor:
        """Attention of one row: q [c, H, D] at positions start..start+c-1 over keys and values [kv,
        Hkv, D and value_dim] -> [c, H, value_dim]."""
        num_queries, num_heads, head_dim = q.shape
        num_kv_heads = keys.shape[1]
        end = start + num_queries
        begin = 0 if variant.window is None else max(0, start - variant.window + 1)
        keys, values = keys[begin:end], values[begin:end]
        # [Hkv, group · c, D]: the query heads of a group share one key head.
        grouped = (
            q.to(self.wide)
            .view(num_queries, num_kv_heads, -1, head_dim)
            .permute(1, 2, 0, 3)
            .reshape(num_kv_heads, -1, head_dim)
        )
        scores = torch.matmul(grouped, keys.permute(1, 2, 0)) * (variant.scale * variant.k_scale)
        if variant.softcap is not None:
            scores = scores.div_(variant.softcap).tanh_().mul_(variant.softcap)
        scores = scores.view(num_kv_heads, -1, num_queries, end - begin)
        if num_queries > 1:
            distance = torch.arange(start, end, device=q.device)[:, None] - torch.arange(
                begin, end, device=q.device
            )
            hidden = distance < 0
            if variant.window is not None:
                hidden |= distance >= variant.window
            scores.masked_fill_(hidden, -torch.inf)
        if variant.sinks is not None:
            sinks = variant.sinks.to(self.wide).view(num_kv_heads, -1, 1, 1)
            scores = torch.cat((scores, sinks.expand(-1, -1, num_queries, 1)), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : end - begin]
        weights = weights.reshape(num_kv_heads, -1, end - begin)
        out = torch.matmul(weights, values.permute(1, 0, 2))
        if variant.v_scale != 1.0:
            out = out * variant.v_scale
        return (
            out.view(num_kv_heads, -1, num_queries, out.shape[-1])
            .permute(2, 0, 1, 3)
            .reshape(num_queries, num_heads, -1)
            .to(q.dtype)
        )


def create(shape: AttentionShape) -> TorchRefAttention:
    """The reference backend, which runs everywhere."""
    return TorchRefAttention(shape)
