"""8-bit linear layers (``w8a8_int8``) on the C++ kernel (kernels/cpu/linear_int8.cpp). Activations
in bf16 or fp32."""

from __future__ import annotations

import ctypes

import torch

from setpoint.engine.kernels.cpu.calls import Int8LinearCall
from setpoint.engine.kernels.cpu.library import DTYPES, Kernels, load
from setpoint.engine.kernels.ops import Gate, KernelsUnavailable
from setpoint.engine.quant.cpu_linear import PANEL, gate_fields, interleave, panels
from setpoint.engine.quant.w8a8_int8 import MAX_K, block_size

UNSIGNED = 128
"""The kernel adds this to an activation's number to make it unsigned."""
WORD = 4
"""Numbers in one word of a panel."""


class Int8Weight:
    """Implements ``quant.base.PackedWeight``. gate: see ``GatedMethod.pack_gated``."""

    product = "int8"

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        kernels: Kernels,
        gate: Gate | None = None,
    ) -> None:
        self.columns, self.k = weight.shape
        assert self.k < MAX_K
        self.dtype = weight.dtype
        if gate is not None:
            self.columns //= 2
            weight = interleave(weight, kernels.vector_columns)
            bias = None if bias is None else interleave(bias, kernels.vector_columns)
        self._bias = bias
        self.kernels = kernels
        numbers, scales = _quantize_weight(weight, kernels)
        missing = -len(weight) % PANEL
        self._panels = panels(numbers, kernels.k_multiple)
        self._scales = torch.nn.functional.pad(scales, (0, missing))
        self._shifts = torch.nn.functional.pad(
            numbers.sum(1, dtype=torch.int32) * -UNSIGNED, (0, missing)
        )
        held = (self._panels, self._scales, self._shifts, *(() if bias is None else (bias,)))
        self.num_bytes = sum(tensor.nbytes for tensor in held)
        self.call = Int8LinearCall(
            weight=self._panels.data_ptr(),
            scales=self._scales.data_ptr(),
            shifts=self._shifts.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            columns=self.columns,
            k=self.k,
            k_words=self._panels.shape[1],
            dtype=DTYPES[weight.dtype],
            **gate_fields(gate),
        )
        self._call_address = ctypes.addressof(self.call)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == self.dtype
        assert x.shape[1] == self.k
        assert x.is_contiguous()
        out = torch.empty((len(x), self.columns), dtype=self.dtype)
        call = self.call
        call.x = x.data_ptr()
        call.out = out.data_ptr()
        call.rows = len(x)
        call.threads = torch.get_num_threads()
        self.kernels.linear_int8(self._call_address)
        return out


def _quantize_weight(weight: torch.Tensor, kernels: Kernels) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of ``w8a8_int8.quantize_weight``, computed by the kernel, with K padded with zeros
    to whole words."""
    rows, k = weight.shape
    weight = weight.contiguous()
    numbers, scales = (
        torch.empty((rows, -(-k // WORD) * WORD), dtype=torch.uint8),
        torch.empty(rows),
    )
    threads = torch.get_num_threads()
    address = numbers.data_ptr()
    kernels.int8_round(
        weight.data_ptr(),
        rows,
        k,
        address,
        numbers.shape[1],
        scales.data_ptr(),
        DTYPES[weight.dtype],
        threads,
    )
    return numbers.bitwise_xor_(UNSIGNED).view(torch.int8), scales.div_(block_size(k))


class Int8Linear:
    """Implements ``quant.base.GatedMethod``."""

    copies = True

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Int8Weight:
        return Int8Weight(weight, bias, self._kernels)

    def pack_gated(self, weight: torch.Tensor, bias: torch.Tensor | None, gate: Gate) -> Int8Weight:
        return Int8Weight(weight, bias, self._kernels, gate)


def create(dtype: torch.dtype, *, level: str | None = None) -> Int8Linear:
    """The method at the given instruction level (None: the best). Raises KernelsUnavailable with
    the reason if it cannot run."""
    if dtype not in DTYPES:
        raise KernelsUnavailable(f"the C++ kernels take bf16 and fp32, not {dtype}")
    return Int8Linear(load(level))
