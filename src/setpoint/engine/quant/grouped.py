"""Products of rows with the weight of an expert each. The weights are of one shape and packed by
one method; whatever multiplies a row alone multiplies it here."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch

from setpoint.engine.kernels.cpu.calls import ExpertsCall, Int8LinearCall, LinearCall
from setpoint.engine.kernels.cpu.library import Kernels
from setpoint.engine.kernels.ops import KernelsUnavailable
from setpoint.engine.kernels.triton.availability import require_triton
from setpoint.engine.quant.linear_method import PackedWeight
from setpoint.engine.quant.plain import PlainWeight
from setpoint.engine.quant.rounded import RoundedWeight


class GroupedWeight(Protocol):
    """The weights of E experts, [N, K] each."""

    num_bytes: int
    """Bytes of all of them."""
    num_experts: int

    def __call__(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """x [T, K] or [T · k, K], contiguous, and ids [T, k] int32 -> [T · k, N]: row t · k + j is
        the product with expert ids[t, j] of row t of x or, if x has a row for each, of row
        t · k + j. Experts are counted from ``first``; a row whose expert is not among them is
        undefined."""
        ...

    def replace(self, weights: Sequence[PackedWeight]) -> None:
        """Multiply by these weights from now on, also in steps that have been captured."""
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

    def __init__(self, weights: Sequence[PackedWeight], first: int = 0) -> None:
        self.num_bytes = sum(weight.num_bytes for weight in weights)
        self.num_experts = len(weights)
        self._first = first
        self.replace(weights)

    def replace(self, weights: Sequence[PackedWeight]) -> None:
        self._weights = weights

    def __call__(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        pairs = ids.flatten() - self._first
        rows = torch.arange(len(pairs), device=x.device) // (len(pairs) // len(x))
        out = x.new_empty((len(pairs), self._weights[0](x[:1]).shape[1]))
        for expert in pairs.unique().tolist():
            if 0 <= expert < self.num_experts:
                places = (pairs == expert).nonzero()[:, 0]
                out[places] = self._weights[expert](x[rows[places]])
        return out


class StackedExperts:
    """Implements GroupedWeight with torch's grouped product, for unchanged weights where Triton
    cannot run: no number goes back to the host. Has not run on a GPU."""

    def __init__(self, weights: Sequence[PlainWeight], first: int = 0) -> None:
        self.num_bytes = sum(weight.num_bytes for weight in weights)
        self.num_experts = len(weights)
        self._first = first
        self._stacked = torch.empty(
            (len(weights), *weights[0].weight.shape),
            dtype=weights[0].weight.dtype,
            device=weights[0].weight.device,
        )
        self.replace(weights)

    def replace(self, weights: Sequence[PlainWeight]) -> None:
        # All at once, because weights that stay may be views of what is overwritten.
        self._stacked.copy_(torch.stack([weight.weight for weight in weights]))
        for weight, part in zip(weights, self._stacked, strict=True):
            weight.weight = part  # so that it is held once
        biases = [weight.bias for weight in weights if weight.bias is not None]
        self._biases = torch.stack(biases) if biases else None

    def __call__(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        pairs = ids.flatten() - self._first
        is_here = (pairs >= 0) & (pairs < self.num_experts)
        pairs = pairs.where(is_here, self.num_experts)  # these come last
        order = pairs.argsort(stable=True)
        experts = torch.arange(self.num_experts, device=x.device)
        ends = (pairs.unsqueeze(1) == experts).sum(0).cumsum(0).int()
        rows = x[order // (len(pairs) // len(x))]
        found = torch.nn.functional.grouped_mm(rows, self._stacked.transpose(1, 2), offs=ends)
        if self._biases is not None:
            found += self._biases[pairs[order].clamp(max=self.num_experts - 1)]
        return torch.empty_like(found).index_copy_(0, order, found)


class TritonExperts:
    """Implements GroupedWeight on the Triton kernel (kernels/triton/grouped.py), for unchanged
    weights and those of 8 bits: no number goes back to the host, and a row's bits do not depend on
    the other rows, but on how many there are. Has not run on a GPU."""

    def __init__(self, weights: Sequence[PlainWeight], first: int = 0) -> None:
        self.num_bytes = sum(weight.num_bytes for weight in weights)
        self.num_experts = len(weights)
        self._first = first
        self._stacks: dict[str, torch.Tensor] = {}
        """Each tensor that a weight has, of all of them."""
        one = weights[0]
        self._rounding = one.rounding if isinstance(one, RoundedWeight) else None
        self.replace(weights)

    def replace(self, weights: Sequence[PlainWeight]) -> None:
        for name in ("weight", "bias", "scales"):
            parts = [getattr(weight, name, None) for weight in weights]
            if parts[0] is None:
                continue
            # All at once, because weights that stay may be views of what is overwritten.
            together = torch.stack(parts)
            self._stacks.setdefault(name, together).copy_(together)
            for weight, part in zip(weights, self._stacks[name], strict=True):
                setattr(weight, name, part)  # so that it is held once

    def __call__(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self._multiplied(x, ids, fixed=False)

    def invariant(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """See ``quant.linear_method.InvariantProduct``."""
        return self._multiplied(x, ids, fixed=True)

    def _multiplied(self, x: torch.Tensor, ids: torch.Tensor, *, fixed: bool) -> torch.Tensor:
        from setpoint.engine.kernels.triton.grouped import Scales, multiply_pairs

        rows, scales = x, None
        if self._rounding is not None:
            rows, of_rows = self._rounding(x)
            scales = Scales(of_rows, self._stacks["scales"])
        return multiply_pairs(
            rows,
            self._stacks["weight"],
            ids,
            dtype=x.dtype,
            first=self._first,
            biases=self._stacks.get("bias"),
            scales=scales,
            fixed=fixed,
        )


class KernelExperts:
    """Implements GroupedWeight on the C++ kernels (kernels/cpu/products/experts.cpp). The rows of
    an expert have the bits that its weight alone gives them together."""

    def __init__(self, weights: Sequence[KernelWeight], first: int = 0) -> None:
        one = weights[0]
        self.num_bytes = sum(weight.num_bytes for weight in weights)
        self.num_experts = len(weights)
        self._kernels, self._dtype, self._k = one.kernels, one.dtype, one.k
        self._columns = one.columns
        if all(hasattr(weight, "product") for weight in weights):
            self.product = "int8"
        self._calls = (type(one.call) * len(weights))()
        self.replace(weights)
        self._call = ExpertsCall(
            weights=ctypes.addressof(self._calls),
            first=first,
            experts=len(weights),
            x_bytes=one.k * one.dtype.itemsize,
            out_bytes=one.columns * one.dtype.itemsize,
            is_int8=isinstance(one.call, Int8LinearCall),
        )
        self._call_address = ctypes.addressof(self._call)

    def replace(self, weights: Sequence[KernelWeight]) -> None:
        self._calls[:] = [weight.call for weight in weights]
        self._weights = weights

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


def _on_gpu(weights: Sequence[PlainWeight], first: int) -> GroupedWeight:
    try:
        require_triton(weights[0].weight.dtype)
    except KernelsUnavailable:  # the operations (kernels.kernel_registry) say why
        return StackedExperts(weights, first)
    return TritonExperts(weights, first)


PLAIN = {"cpu": LoopedExperts, "cuda": _on_gpu}
"""Device type -> how unchanged weights are grouped there, if not by StackedExperts."""


def group(weights: Sequence[PackedWeight], first: int = 0) -> GroupedWeight:
    """The weights of experts, which one method has packed. first: the number of the first one."""
    kinds = {type(getattr(weight, "call", None)) for weight in weights}
    if kinds <= {LinearCall} or kinds <= {Int8LinearCall}:
        # Blocks of different kinds are different calls of one kernel.
        return KernelExperts(weights, first)
    one = weights[0]
    if isinstance(one, RoundedWeight):
        return TritonExperts(weights, first)
    if isinstance(one, PlainWeight):
        return PLAIN.get(one.weight.device.type, StackedExperts)(weights, first)
    return LoopedExperts(weights, first)
