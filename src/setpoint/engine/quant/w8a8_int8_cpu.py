"""8-bit linear layers (``w8a8_int8``) on the C++ kernel (kernels/cpu/products/linear_int8.cpp).
Activations in bf16 or fp32."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from setpoint.core.model import BLOCK_KINDS, W8A8
from setpoint.engine.kernels.cpu.calls import Int8LinearCall
from setpoint.engine.kernels.cpu.library import DTYPES, Kernels, load
from setpoint.engine.kernels.ops import GateActivation, KernelsUnavailable
from setpoint.engine.quant.cpu_linear import PANEL, gate_fields, interleave, panels
from setpoint.engine.quant.w8a8_int8 import MAX_K, block_size

UNSIGNED = 128
"""The kernel adds this to an activation's number to make it unsigned."""
WORD = 4
"""Numbers in one word of a panel."""


@dataclass(slots=True, frozen=True)
class RoundedWeight:
    """A weight [N, K] in 8 bits, and how activations are rounded to meet it."""

    numbers: torch.Tensor
    """int8 [N, K], with K padded with zeros to whole words."""
    scales: torch.Tensor
    """fp32 [N]."""
    k: int
    dtype: torch.dtype
    """The dtype of activations and results."""
    rotated: bool
    """Whether both are rotated (``w8a8_int8``)."""
    x_scale: float = 0.0
    """The scale of all activations, which become whole multiples from -128 to 127 of it; 0: each
    row has its own."""


class Int8Weight:
    """Implements ``quant.linear_method.PackedWeight``. gate: see ``GatedMethod.pack_gated``."""

    product = "int8"

    def __init__(
        self,
        weight: RoundedWeight,
        bias: torch.Tensor | None,
        kernels: Kernels,
        gate: GateActivation | None = None,
    ) -> None:
        numbers, scales = weight.numbers, weight.scales
        self.columns, self.k, self.dtype = len(numbers), weight.k, weight.dtype
        assert self.k < MAX_K
        if gate is not None:
            self.columns //= 2
            numbers, scales, bias = (
                None if each is None else interleave(each, kernels.vector_columns)
                for each in (numbers, scales, bias)
            )
        self._bias = bias
        self.kernels = kernels
        missing = -len(numbers) % PANEL
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
            x_scale=weight.x_scale,
            rotated=weight.rotated,
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


def rounded(weight: torch.Tensor, kernels: Kernels) -> RoundedWeight:
    """The result of ``w8a8_int8.quantize_weight``, computed by the kernel."""
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
    numbers = numbers.bitwise_xor_(UNSIGNED).view(torch.int8)
    return RoundedWeight(numbers, scales.div_(block_size(k)), k, weight.dtype, rotated=True)


def stored(rows: torch.Tensor) -> RoundedWeight:
    """A weight of a checkpoint, from its rows of W8A8 (``core.model.BLOCK_KINDS``). Its activations
    are in bf16; of scales that differ, the largest counts, as in vLLM."""
    k = rows.shape[1] - BLOCK_KINDS[W8A8].row_end
    numbers = torch.nn.functional.pad(rows[:, :k], (0, -k % WORD)).view(torch.int8)
    ends = rows[:, k:].contiguous().view(torch.float32)
    scales, x_scale = ends[:, 0].contiguous(), float(ends[:, 1].max()) if len(ends) else 0.0
    return RoundedWeight(numbers, scales, k, torch.bfloat16, rotated=False, x_scale=x_scale)


class Int8Linear:
    """Implements ``quant.linear_method.GatedMethod``."""

    copies = True

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Int8Weight:
        return Int8Weight(rounded(weight, self._kernels), bias, self._kernels)

    def pack_gated(
        self, weight: torch.Tensor, bias: torch.Tensor | None, gate: GateActivation
    ) -> Int8Weight:
        return Int8Weight(rounded(weight, self._kernels), bias, self._kernels, gate)


def create(dtype: torch.dtype, *, level: str | None = None) -> Int8Linear:
    """The method at the given instruction level (None: the best). Raises KernelsUnavailable with
    the reason if it cannot run."""
    if dtype not in DTYPES:
        raise KernelsUnavailable(f"the C++ kernels take bf16 and fp32, not {dtype}")
    return Int8Linear(load(level))
