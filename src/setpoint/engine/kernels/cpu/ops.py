"""``kernels.ops.Ops`` on the C++ kernels: checks tensors, passes addresses.

Activations in bf16 or fp32; float64 is left to the reference.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from setpoint.engine.kernels.cpu.library import DTYPES, Kernels, RopeCall, load
from setpoint.engine.kernels.ops import KernelsUnavailable


class CpuOps:
    """Implements ``kernels.ops.Ops`` for tensors of one dtype."""

    def __init__(self, dtype: torch.dtype, kernels: Kernels) -> None:
        self._dtype = dtype
        self._dtype_number = DTYPES[dtype]
        self._kernels = kernels
        # Calls of one token are a few µs long, so the argument struct is filled in place, not built anew.
        self._rope = RopeCall(dtype=DTYPES[dtype])
        self._rope_address = ctypes.addressof(self._rope)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
        out = torch.empty_like(x)
        self._norm(x, None, weight, out, eps, offset)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert residual.shape == x.shape
        assert residual.dtype == self._dtype
        assert residual.is_contiguous()
        self._norm(x, residual.data_ptr(), weight, x, eps, offset)
        return x, residual

    def _norm(self, x: torch.Tensor, residual: int | None, weight: torch.Tensor, out: torch.Tensor, eps: float, offset: float) -> None:
        assert x.is_contiguous()
        assert x.dtype == weight.dtype == self._dtype
        rows, columns = x.shape
        self._kernels.rms_norm(
            x.data_ptr(),
            residual,
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            columns,
            eps,
            offset,
            self._dtype_number,
            torch.get_num_threads(),
        )

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
    ) -> torch.Tensor:
        """Rotates q in place and returns it; k stays as it is."""
        call = self._rope
        call.tokens, call.num_heads, head_dim = q.shape
        call.num_kv_heads = k.shape[1]
        call.head_dim = head_dim
        call.rotary_dim = cos_sin.shape[1]
        q_stride, k_stride, v_stride = q.stride(), k.stride(), v.stride()
        assert q.dtype == k.dtype == v.dtype == self._dtype
        assert q_stride[1:] == k_stride[1:] == v_stride[1:] == (head_dim, 1)
        assert cos_sin.dtype == torch.float32
        assert k_cache.is_contiguous()
        assert v_cache.is_contiguous()
        call.q = q.data_ptr()
        call.k = k.data_ptr()
        call.v = v.data_ptr()
        call.cos_sin = cos_sin.data_ptr()
        call.positions = positions.data_ptr()
        call.k_cache = k_cache.data_ptr()
        call.v_cache = v_cache.data_ptr()
        call.kv_index = kv_index.data_ptr()
        call.q_stride = q_stride[0]
        call.k_stride = k_stride[0]
        call.v_stride = v_stride[0]
        call.kv_dtype = DTYPES[k_cache.dtype]
        call.threads = torch.get_num_threads()
        self._kernels.rope_and_store(self._rope_address)
        return q

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._gated(self._kernels.silu_mul, gate_up)

    def gelu_tanh_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._gated(self._kernels.gelu_tanh_mul, gate_up)

    def _gated(self, kernel: Callable[..., None], gate_up: torch.Tensor) -> torch.Tensor:
        assert gate_up.is_contiguous()
        assert gate_up.dtype == self._dtype
        rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((rows, columns), dtype=self._dtype)
        kernel(gate_up.data_ptr(), out.data_ptr(), rows, columns, self._dtype_number, torch.get_num_threads())
        return out


def create(dtype: torch.dtype, *, level: str | None = None) -> CpuOps:
    """The operations at the given level (None: the best). KernelsUnavailable with the reason if they cannot run."""
    if dtype not in DTYPES:
        raise KernelsUnavailable(f"the C++ kernels take bf16 and fp32, not {dtype}")
    return CpuOps(dtype, load(level))
