"""Products of rows with the weight of an expert each. The weights are of one shape and packed by
one method; whatever multiplies a row alone multiplies it here."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch

from setpoint.engine.kernels.cpu.calls import ExpertsCall, Int8LinearCall, LinearCall
from setpoint.engine.kernels.cpu.library import Kernels
from setpoint.engine.quant.linear_method import PackedWeight
from setpoint.engine.quant.plain import PlainWeight


class GroupedWeight(Protocol):
    """The weights of E experts, [N, K] each."""

    num_bytes: int
    """Bytes of all of them."""
    num_experts: int

    def __call__(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """x [T, K] or [T · k, K], contiguous, and ids [T, k] int32 -> [T · k, N]: row t · k + j is
        the product with expert ids[t, j] of row t of x or, if x has a row for each, of row
        t · k + j."""
        ...


class KernelWeight(PackedWeight, Protocol):
    """A weight that one call of a C++ kernel multiplies by."""

    call: LinearCall | Int8LinearCall
    kernels: Kernels
    columns: int
    k: int
    dtype: torch.dtype


class LoopedExperts:
    """Implements GroupedWeight for any packed weights: multiplies by one expert after the other."""

    def __init__(self, weights: Sequence[PackedWeight]) -> None:
        self.num_bytes = sum(weight.num_bytes for weight in weights)
        self.num_experts = len(weights)
        self._weights = weights

    def __call__(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        pairs = ids.flatten()
        rows = torch.arange(len(pairs), device=x.device) // (len(pairs) // len(x))
        out: torch.Tensor | None = None
        for expert in pairs.unique().tolist():
            places = (pairs == expert).nonzero()[:, 0]
            found = self._weights[expert](x[rows[places]])
            if out is None:
                out = found.new_empty((len(pairs), found.shape[1]))
            out[places] = found
        assert out is not None, "a step has at least one token"
        return out


class StackedExperts:
    """Implements GroupedWeight with torch's grouped product, for unchanged weights on devices other
    than CPUs: no number goes back to the host. Has not run on a GPU."""

    def __init__(self, weights: Sequence[PlainWeight]) -> None:
        assert all(weight.bias is None for weight in weights), "no mixture has biases yet"
        self.num_bytes = sum(weight.num_bytes for weight in weights)
        self.num_experts = len(weights)
        self._stacked = torch.stack([weight.weight for weight in weights])
        for weight, part in zip(weights, self._stacked, strict=True):
            weight.weight = part  # so that it is held once

    def __call__(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        pairs = ids.flatten()
        order = pairs.argsort(stable=True)
        experts = torch.arange(self.num_experts, device=x.device)
        ends = (pairs.unsqueeze(1) == experts).sum(0).cumsum(0).int()
        rows = x[order // (len(pairs) // len(x))]
        found = torch.nn.functional.grouped_mm(rows, self._stacked.transpose(1, 2), offs=ends)
        return torch.empty_like(found).index_copy_(0, order, found)


class KernelExperts:
    """Implements GroupedWeight on the C++ kernels (kernels/cpu/experts.cpp). A row's bits are those
    of its expert's weight alone, in any batch."""

    def __init__(self, weights: Sequence[KernelWeight]) -> None:
        first = weights[0]
        self.num_bytes = sum(weight.num_bytes for weight in weights)
        self.num_experts = len(weights)
        self._weights = weights
        self._kernels, self._dtype, self._k = first.kernels, first.dtype, first.k
        self._columns = first.columns
        calls = type(first.call) * len(weights)
        self._calls = calls(*(weight.call for weight in weights))
        self._call = ExpertsCall(
            weights=ctypes.addressof(self._calls),
            experts=len(weights),
            x_bytes=first.k * first.dtype.itemsize,
            out_bytes=first.columns * first.dtype.itemsize,
            is_int8=isinstance(first.call, Int8LinearCall),
        )
        self._call_address = ctypes.addressof(self._call)

    def __call__(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        assert x.dtype == self._dtype
        assert x.shape[1] == self._k
        assert x.is_contiguous()
        assert ids.dtype == torch.int32
        assert ids.is_contiguous()
        out = torch.empty((ids.numel(), self._columns), dtype=self._dtype)
        call = self._call
        call.x = x.data_ptr()
        call.ids = ids.data_ptr()
        call.out = out.data_ptr()
        call.rows = ids.numel()
        call.pairs_per_row = ids.numel() // len(x)
        call.threads = torch.get_num_threads()
        self._kernels.experts(self._call_address)
        return out


PLAIN = {"cpu": LoopedExperts}
"""Device type -> how unchanged weights are grouped there, if not by StackedExperts."""


def group(weights: Sequence[PackedWeight]) -> GroupedWeight:
    """The weights of all experts, which one method has packed."""
    if all(hasattr(weight, "call") for weight in weights):
        # Blocks of different kinds are different calls of one kernel.
        return KernelExperts(weights)
    first = weights[0]
    if isinstance(first, PlainWeight):
        return PLAIN.get(first.weight.device.type, StackedExperts)(weights)
    return LoopedExperts(weights)
