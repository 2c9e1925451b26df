"""Attention by two backends on one pool: one for decode steps, another for all others."""

from __future__ import annotations

import torch

from setpoint.engine.attention.attention_backend import (
    AttentionBackend,
    AttentionBatch,
    AttentionVariant,
)


class SplitAttention:
    """Implements ``attention.attention_backend.AttentionBackend``. A decode step has one token in
    every row."""

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        self.prefill, self.decode = prefill, decode

    @property
    def is_capturable(self) -> bool:
        """Whether every step can be captured; ``of_kind`` says it of one kind."""
        return self.prefill.is_capturable and self.decode.is_capturable

    def prepare(self, batch: AttentionBatch) -> None:
        self._of(batch).prepare(batch)

    def forward(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        variant: AttentionVariant,
    ) -> torch.Tensor:
        return self._of(batch).forward(q, k_cache, v_cache, batch, variant)

    def _of(self, batch: AttentionBatch) -> AttentionBackend:
        return of_kind(self, is_decode=len(batch.positions) == len(batch.slots))


def of_kind(attention: AttentionBackend, *, is_decode: bool) -> AttentionBackend:
    """The backend that computes steps of this kind."""
    if not isinstance(attention, SplitAttention):
        return attention
    return attention.decode if is_decode else attention.prefill
