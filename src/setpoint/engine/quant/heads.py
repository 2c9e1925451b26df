"""Products of each head with a weight of its own: those of latent attention (decision 0066)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from setpoint.engine.kernels.cpu.calls import HeadsCall, LinearCall
from setpoint.engine.quant.cpu_linear import PanelWeight
from setpoint.engine.quant.linear_method import PackedWeight
from setpoint.engine.quant.plain import PlainWeight


class LoopedHeads:
    """Implements ``PackedWeight`` over x [T, H, K], whose rows may be strided -> [T, H, N]: x[:, h]
    is multiplied by weight h."""

    def __init__(self, weights: Sequence[PackedWeight]) -> None:
        self.num_bytes = sum(weight.num_bytes for weight in weights)
        self._weights = weights

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        heads = zip(self._weights, x.unbind(1), strict=True)
        return torch.stack([weight(each.contiguous()) for weight, each in heads], dim=1)


class StackedHeads:
    """The same in one operation of torch, for unchanged weights on devices other than CPUs. Has not
    run on a GPU."""

    def __init__(self, weights: Sequence[PlainWeight]) -> None:
        self.num_bytes = sum(weight.num_bytes for weight in weights)
        self._weights = torch.stack([weight.weight for weight in weights])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty((*x.shape[:2], self._weights.shape[1]))
        torch.bmm(x.transpose(0, 1), self._weights.transpose(1, 2), out=out.transpose(0, 1))
        return out

    def invariant(self, x: torch.Tensor) -> torch.Tensor:
        """See ``quant.linear_method.InvariantProduct``."""
        from setpoint.engine.kernels.triton.grouped import multiply_heads

        return multiply_heads(x, self._weights)


class KernelHeads:
    """The same on the C++ kernel (kernels/cpu/products/heads.cpp). A row's bits are those of its
    head's weight alone, in any batch."""

    def __init__(self, weights: Sequence[PanelWeight]) -> None:
        first = weights[0]
        self.num_bytes = sum(weight.num_bytes for weight in weights)
        self._weights = weights
        self._kernels, self._dtype = first.kernels, first.dtype
        self._shape = (len(weights), first.k)
        self._columns = first.columns
        self._calls = (LinearCall * len(weights))(*(weight.call for weight in weights))
        self._call = HeadsCall(
            weights=ctypes.addressof(self._calls),
            heads=len(weights),
            x_bytes=first.k * first.dtype.itemsize,
            out_bytes=first.columns * first.dtype.itemsize,
        )
        self._call_address = ctypes.addressof(self._call)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == self._dtype
        assert x.shape[1:] == self._shape
        assert x.stride(2) == 1
        out = torch.empty((*x.shape[:2], self._columns), dtype=self._dtype)
        call, size = self._call, self._dtype.itemsize
        call.x = x.data_ptr()
        call.out = out.data_ptr()
        call.rows = len(x)
        call.x_row, call.x_head = x.stride(0) * size, x.stride(1) * size
        call.threads = torch.get_num_threads()
        self._kernels.heads(self._call_address)
        return out


PLAIN = {"cpu": LoopedHeads}
"""Device type -> how unchanged weights are multiplied there, if not by StackedHeads."""


def of_heads(weights: Sequence[PackedWeight]) -> PackedWeight:
    """The weights of all heads, which one method has packed."""
    if all(isinstance(weight, PanelWeight) for weight in weights):
        return KernelHeads(weights)
    one = weights[0]
    if isinstance(one, PlainWeight):
        return PLAIN.get(one.weight.device.type, StackedHeads)(weights)
    return LoopedHeads(weights)
