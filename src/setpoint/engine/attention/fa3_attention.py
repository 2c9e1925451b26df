"""Attention over the paged pool by FlashAttention 3, as the package sglang-kernel has it, on NVIDIA
GPUs of the Hopper generation. Has not run on one.

The kernel reads the rows' lengths and pages from tensors, so a captured step serves all lengths.
How it divides long rows depends on the batch, and so do a row's last bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from setpoint.engine.attention.attention_backend import (
    AttentionBatch,
    AttentionShape,
    AttentionVariant,
)
from setpoint.engine.attention.packages import INSTEAD, Package, require_plain
from setpoint.engine.attention.row_windows import first_pages
from setpoint.engine.kernels.device import compute_capability
from setpoint.engine.kernels.ops import KernelsUnavailable

PACKAGE = Package("sglang-kernel", "sgl_kernel.flash_attn", "0.4.10", "0.5")
DTYPES = (torch.bfloat16, torch.float16)
LARGEST_HEAD, HEAD_MULTIPLE = 256, 8


class Fa3Attention:
    """Implements ``attention.attention_backend.AttentionBackend``. kernel: the package's
    flash_attn_with_kvcache."""

    is_capturable = True

    def __init__(self, shape: AttentionShape, kernel: Callable[..., torch.Tensor]) -> None:
        self._page_size = shape.page_size
        self._kernel = kernel
        self._pages: dict[tuple[int, int | None], tuple[torch.Tensor, torch.Tensor]] = {}
        """(Cache group, window) -> the pages [n, W] that each row sees, and its positions [n] from
        the first of them on."""

    def prepare(self, batch: AttentionBatch) -> None:
        """Forget the step before: the first layer with a window finds the pages for all of them."""
        self._pages = {key: each for key, each in self._pages.items() if key[0] != batch.group}

    def forward(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        variant: AttentionVariant,
    ) -> torch.Tensor:
        assert variant.k_scale == variant.v_scale == 1.0, "scales of an 8-bit cache"
        key = batch.group, variant.window
        if key not in self._pages:
            self._pages[key] = self._seen(batch, variant.window)
        pages, kv_lens = self._pages[key]
        # A row has at most all tokens; its real number is not known while a step is captured.
        longest = 1 if len(q) == len(batch.slots) else len(q)
        sinks = None if variant.sinks is None else variant.sinks.to(torch.bfloat16)
        # Nothing writes the results of tokens that only fill a step up.
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        return self._kernel(
            q,
            k_cache,
            v_cache,
            cache_seqlens=kv_lens,
            page_table=pages,
            cu_seqlens_q=batch.cu_q,
            max_seqlen_q=longest,
            softmax_scale=variant.scale,
            causal=True,
            window_size=(-1, -1) if variant.window is None else (variant.window - 1, 0),
            softcap=variant.softcap or 0.0,
            sinks=sinks,
            out=out,
        )

    def _seen(self, batch: AttentionBatch, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The entry of a window in ``_pages``."""
        table = batch.page_table
        if window is None:
            return table[batch.slots], batch.kv_lens
        first = first_pages(batch.kv_lens, batch.cu_q.diff(), window, self._page_size)
        columns = first.unsqueeze(1) + torch.arange(table.shape[1], device=table.device)
        columns = columns.clip(max=table.shape[1] - 1)  # beyond the row's last page
        pages = table[batch.slots.unsqueeze(1), columns]
        return pages, (batch.kv_lens - first * self._page_size).int()


def create(shape: AttentionShape) -> Fa3Attention:
    """The backend for this shape. Raises KernelsUnavailable with the reason if it cannot run."""
    capability = compute_capability(shape.device)
    if capability // 10 != 9:
        has = f"this one has {capability / 10}" if capability else f"{shape.device.type} is none"
        raise KernelsUnavailable(
            f"FlashAttention 3 runs on GPUs of compute capability 9.0, and {has}; {INSTEAD}"
        )
    require_plain(shape)
    if shape.dtype not in DTYPES or shape.kv_dtype != shape.dtype:
        raise KernelsUnavailable(
            "FlashAttention 3 takes bf16 and fp16, with the cache in the same type, not"
            f" {shape.dtype} with {shape.kv_dtype} in the cache; {INSTEAD}"
        )
    if shape.head_dim > LARGEST_HEAD or shape.head_dim % HEAD_MULTIPLE:
        raise KernelsUnavailable(
            f"FlashAttention 3 takes head dimensions up to {LARGEST_HEAD} that are multiples of"
            f" {HEAD_MULTIPLE}, not {shape.head_dim}; {INSTEAD}"
        )
    return Fa3Attention(shape, PACKAGE.load().flash_attn_with_kvcache)
