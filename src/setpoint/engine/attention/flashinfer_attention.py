"""Attention over the paged pool by FlashInfer, on NVIDIA GPUs from Ampere on. Has not run on one.

FlashInfer plans a step on the host, which cannot be captured: its steps run eagerly. It writes a
plan into pinned memory and has it copied to the device from there, and the next plan may be made
before that copy has happened, because the next step is planned while the device computes this one.
So the plans of one kind take turns in several pieces of pinned memory, and wait for the copy of the
last plan in the same one.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from setpoint.engine.attention.attention_backend import (
    AttentionBatch,
    AttentionShape,
    AttentionVariant,
)
from setpoint.engine.attention.packages import INSTEAD, Package, require_plain
from setpoint.engine.attention.row_windows import first_pages
from setpoint.engine.kernels.device import Mark, compute_capability, marker, wait
from setpoint.engine.kernels.ops import KernelsUnavailable

PACKAGE = Package("flashinfer-python", "flashinfer", "0.7.4", "0.8")
LEAST_CAPABILITY = 80
DTYPES = (torch.bfloat16, torch.float16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
HEAD_DIMS = (64, 128, 256)
WORKSPACE_BYTES = 128 << 20
"""Device memory for the parts of rows that are cut; the size that its manual recommends."""
KERNELS = "fa2"
"""Its implementation for all generations; it knows windows, caps and 8-bit caches."""
RING = 2
"""Pieces of pinned memory: one that the device may still copy, and one that is being written."""


@dataclass(slots=True, frozen=True)
class Kind:
    """What of a layer is part of a plan."""

    scale: float
    softcap: float
    window: int | None


@dataclass(slots=True)
class Turn:
    """One of the ring."""

    wrapper: Any
    """FlashInfer's object, with pinned memory of its own."""
    copied: Mark | None = None
    """When the device has copied its last plan."""


class Plans:
    """The plans of one kind, on the pages of one cache group."""

    def __init__(self, make: Callable[[], Any]) -> None:
        """make: makes one of FlashInfer's objects."""
        self._ring = [Turn(make()) for _ in range(RING)]

    @property
    def wrapper(self) -> Any:
        """The object with the last plan."""
        return self._ring[0].wrapper

    def plan(self, mark: Callable[[], Mark], *rows: torch.Tensor, **constants: Any) -> None:
        """Plan a step. mark: marks the present point of the device's work."""
        self._ring.append(self._ring.pop(0))
        turn = self._ring[0]
        if turn.copied is not None:
            wait(turn.copied)
        turn.wrapper.plan(*rows, **constants)
        turn.copied = mark()


@dataclass(slots=True)
class Step:
    """A step's rows on the pages of one cache group."""

    batch: AttentionBatch
    plans: dict[Kind, Plans] = field(default_factory=dict)
    """The plans of the kinds that the group's layers have had so far."""


class FlashInferAttention:
    """Implements ``attention.attention_backend.AttentionBackend``."""

    is_capturable = False

    def __init__(self, shape: AttentionShape, wrapper: Callable[..., Any]) -> None:
        """wrapper: FlashInfer's BatchPrefillWithPagedKVCacheWrapper. A decode row is to it a prompt
        of one token."""
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=shape.device)
        self._make = lambda: wrapper(workspace, "NHD", backend=KERNELS)
        self._shape = shape
        self._mark = marker(shape.device)
        self._steps: dict[int, Step] = {}
        """Cache group -> its step."""

    def prepare(self, batch: AttentionBatch) -> None:
        """Plan for the kinds of layers that this group has had so far. A layer of another kind is
        planned for in its first ``forward``."""
        step = self._steps.setdefault(batch.group, Step(batch))
        step.batch = batch
        for kind, plans in step.plans.items():
            self._plan(step.batch, kind, plans)

    def forward(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        variant: AttentionVariant,
    ) -> torch.Tensor:
        step = self._steps[batch.group]
        kind = Kind(variant.scale, variant.softcap or 0.0, variant.window)
        if kind not in step.plans:
            step.plans[kind] = Plans(self._make)
            self._plan(step.batch, kind, step.plans[kind])
        run, cache = step.plans[kind].wrapper.run, (k_cache, v_cache)
        scales = {"k_scale": variant.k_scale, "v_scale": variant.v_scale}
        if variant.sinks is None:
            return run(q.contiguous(), cache, **scales)
        out, sums = run(q.contiguous(), cache, return_lse=True, lse_base="ln", **scales)
        # A sink adds exp(sink) to the sum that divides the weights, whose logarithm is ``sums``.
        share = torch.sigmoid(sums - variant.sinks)
        return (out * share.unsqueeze(-1)).to(out.dtype)

    def _plan(self, batch: AttentionBatch, kind: Kind, plans: Plans) -> None:
        shape, page_size = self._shape, self._shape.page_size
        kv_lens, counts = batch.kv_lens_host, np.diff(batch.cu_q_host)
        first = first_pages(kv_lens, counts, kind.window, page_size)
        num_pages = -(-kv_lens // page_size) - first
        ends = np.concatenate(([0], np.cumsum(num_pages))).astype(np.int32)
        last = ((kv_lens - 1) % page_size + 1).astype(np.int32)
        plans.plan(
            self._mark,
            # FlashInfer reads these on the host. In memory that is not pinned, they are copied to
            # the device before the call returns.
            torch.from_numpy(batch.cu_q_host),
            torch.from_numpy(ends),
            self._page_list(batch, kind.window, int(ends[-1])),
            torch.from_numpy(last),
            num_qo_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim_qk=shape.head_dim,
            page_size=page_size,
            causal=True,
            sm_scale=kind.scale,
            window_left=-1 if kind.window is None else kind.window - 1,
            logits_soft_cap=kind.softcap,
            q_data_type=shape.dtype,
            kv_data_type=shape.kv_dtype,
        )

    def _page_list(self, batch: AttentionBatch, window: int | None, length: int) -> torch.Tensor:
        """The pages that the rows see, one row after the other: [length] int32."""
        page_size, device = self._shape.page_size, batch.page_table.device
        first = first_pages(batch.kv_lens, batch.cu_q.diff(), window, page_size)
        counts = -(-batch.kv_lens // page_size) - first
        rows = torch.arange(len(counts), device=device)
        row = rows.repeat_interleave(counts, output_size=length)  # known, so nobody waits
        begins = counts.cumsum(0) - counts
        column = torch.arange(length, device=device) - begins[row] + first[row]
        return batch.page_table[batch.slots[row], column]


def create(shape: AttentionShape) -> FlashInferAttention:
    """The backend for this shape. Raises KernelsUnavailable with the reason if it cannot run."""
    capability = compute_capability(shape.device)
    if capability < LEAST_CAPABILITY:
        has = f"this one has {capability / 10}" if capability else f"{shape.device.type} is none"
        raise KernelsUnavailable(
            "FlashInfer runs on GPUs of compute capability"
            f" {LEAST_CAPABILITY / 10} and more, and {has}; {INSTEAD}"
        )
    require_plain(shape)
    if shape.dtype not in DTYPES or shape.kv_dtype not in (shape.dtype, *FP8):
        raise KernelsUnavailable(
            "FlashInfer takes bf16 and fp16, with the cache in the same type or in fp8, not"
            f" {shape.dtype} with {shape.kv_dtype} in the cache; {INSTEAD}"
        )
    if shape.head_dim not in HEAD_DIMS:
        raise KernelsUnavailable(
            f"FlashInfer takes the head dimensions {', '.join(map(str, HEAD_DIMS))}, not"
            f" {shape.head_dim}; {INSTEAD}"
        )
    module = PACKAGE.load()
    _require_compiler()
    return FlashInferAttention(shape, module.BatchPrefillWithPagedKVCacheWrapper)


def _require_compiler() -> None:
    """FlashInfer compiles its kernels with nvcc when they are first used, unless a package has
    them."""
    has_nvcc = "CUDA_HOME" in os.environ or shutil.which("nvcc")
    if not has_nvcc and importlib.util.find_spec("flashinfer_jit_cache") is None:
        raise KernelsUnavailable(
            "FlashInfer compiles its kernels, and there is neither nvcc (CUDA_HOME, PATH) nor the"
            f" package flashinfer-jit-cache; {INSTEAD}"
        )
