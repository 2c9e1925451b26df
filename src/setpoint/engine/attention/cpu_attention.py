"""Attention over the paged pool by the C++ kernel (kernels/cpu/attention/attention_run.h): any mix
of prefill and decode rows in one call.

Works on bf16 and fp32 and reads K and V, which may be in fp8, in place from their pages. A row's
result is bit for bit the same whatever other rows are in the batch, however its prompt was cut into
chunks, and on any number of threads.
"""

from __future__ import annotations

import ctypes
import weakref

import torch

from setpoint.engine.attention.attention_backend import (
    AttentionBatch,
    AttentionShape,
    AttentionVariant,
)
from setpoint.engine.kernels.cpu.calls import AttentionCall
from setpoint.engine.kernels.cpu.library import DTYPES, KV_DTYPES, Kernels, load
from setpoint.engine.kernels.ops import KernelsUnavailable

HEAD_DIM_MULTIPLE = 16
"""Head dimensions must be a multiple of this, so that they fill whole vectors at the widest
instruction level."""
MAX_GROUP = 128
"""Most query heads per key/value head (plan.h, kQueryRows)."""


class Plan:
    """The division of a step's work among threads (plan.h), and the arguments of the kernel's
    call, which contain it."""

    def __init__(self, shape: AttentionShape, kernels: Kernels) -> None:
        self._kernels = kernels
        plan = kernels.plan_create()
        weakref.finalize(self, kernels.plan_free, plan)
        self.call = AttentionCall(
            plan=plan,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            value_dim=shape.value_dim,
            page_size=shape.page_size,
            q_dtype=DTYPES[shape.dtype],
            kv_dtype=KV_DTYPES[shape.kv_dtype],
        )
        self.address = ctypes.addressof(self.call)

    def cover(self, batch: AttentionBatch) -> None:
        """Make the plan for this batch."""
        call = self.call
        call.cu_q = batch.cu_q.data_ptr()
        call.kv_lens = batch.kv_lens.data_ptr()
        call.slots = batch.slots.data_ptr()
        call.page_table = batch.page_table.data_ptr()
        call.table_stride = batch.page_table.stride(0)
        call.threads = torch.get_num_threads()
        call.rows = len(batch.slots)
        self._kernels.attention_plan(self.address)


class CpuAttention:
    """Implements ``attention.attention_backend.AttentionBackend``."""

    is_capturable = False

    def __init__(self, shape: AttentionShape, kernels: Kernels) -> None:
        self._shape = shape
        self._kernels = kernels
        self.level = kernels.level
        self._plans: dict[int, Plan] = {}
        """Cache group -> its plan. Each group needs its own, because the page table says which rows
        share keys."""

    def prepare(self, batch: AttentionBatch) -> None:
        plan = self._plans.get(batch.group)
        if plan is None:
            plan = self._plans[batch.group] = Plan(self._shape, self._kernels)
        plan.cover(batch)

    def forward(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        variant: AttentionVariant,
    ) -> torch.Tensor:
        q_stride = q.stride()
        assert q_stride[1:] == (self._shape.head_dim, 1)
        assert q.dtype == self._shape.dtype
        assert k_cache.dtype == v_cache.dtype == self._shape.kv_dtype
        assert variant.sinks is None or variant.sinks.dtype == torch.float32
        out = torch.empty((*q.shape[:2], self._shape.value_dim), dtype=self._shape.dtype)
        plan = self._plans[batch.group]
        call = plan.call
        call.q = q.data_ptr()
        call.q_stride = q_stride[0]
        call.out = out.data_ptr()
        call.k_cache = k_cache.data_ptr()
        call.v_cache = v_cache.data_ptr()
        call.value_stride = v_cache.stride(2)
        call.scale = variant.scale * variant.k_scale
        call.v_scale = variant.v_scale
        call.softcap = variant.softcap or 0.0
        call.window = variant.window or 0
        call.sinks = None if variant.sinks is None else variant.sinks.data_ptr()
        self._kernels.attention(plan.address)
        return out


def create(shape: AttentionShape, *, level: str | None = None) -> CpuAttention:
    """The backend at the given instruction level (None: the best). Raises KernelsUnavailable with
    the reason if it cannot serve this shape on this machine."""
    if shape.dtype not in DTYPES or shape.kv_dtype not in KV_DTYPES:
        raise KernelsUnavailable(
            "the C++ kernels take bf16 and fp32, and fp8 in the cache, not"
            f" {shape.dtype} with {shape.kv_dtype} in the cache"
        )
    for size in (shape.head_dim, shape.value_dim):
        if size % HEAD_DIM_MULTIPLE:
            raise KernelsUnavailable(
                f"the head dimension {size} is not a multiple of {HEAD_DIM_MULTIPLE}"
            )
    if shape.num_heads > MAX_GROUP * shape.num_kv_heads:
        raise KernelsUnavailable(f"more than {MAX_GROUP} query heads share a key/value head")
    return CpuAttention(shape, load(level))
