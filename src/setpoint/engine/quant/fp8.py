"""Linear layers with weights in fp8 (E4M3), rounded when they are loaded: the definition of the
numbers, and the methods for CPUs, where activations are not rounded.

A weight has one scale per output channel; on GPUs (``quant.rounded``) an activation has one per
token or, where a folder's weights have one for each block of 128 × 128, one for 128 numbers of it.
Scale = the largest magnitude / 448, number = value · (448 / largest) rounded to the nearest of
E4M3, of two the even one.
"""

from __future__ import annotations

import torch

from setpoint.core.errors import ConfigError
from setpoint.engine.kernels.cpu.library import Kernels, load
from setpoint.engine.kernels.ops import GateActivation, KernelsUnavailable
from setpoint.engine.quant import blocks
from setpoint.engine.quant.linear_method import GgufWeight, PackedWeight
from setpoint.engine.quant.quantised_numbers import BLOCK, Numbers, block_rows
from setpoint.engine.quant.w8a8_int8 import TINY

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0


def quantize_rows(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[R, K] -> (e4m3 [R, K], fp32 scales [R, ceil(K / group)]). A group with a NaN or an infinity
    becomes zeros with the scale NaN."""
    rows, k = x.shape
    groups = torch.nn.functional.pad(x.float(), (0, -k % group)).view(rows, -1, group)
    largest = groups.abs().amax(2, keepdim=True)
    is_zero, is_finite = largest < TINY, largest.isfinite()
    most = torch.full_like(largest, LARGEST)
    inverse = torch.where(is_zero, 0.0, most.div(largest))
    values = torch.where(is_finite, groups * inverse, 0.0)
    # 448 / largest may be rounded up.
    numbers = values.clamp(-LARGEST, LARGEST).to(E4M3).view(rows, -1)[:, :k].contiguous()
    scales = torch.where(is_zero, 0.0, torch.where(is_finite, largest / most, torch.nan))
    return numbers, scales.squeeze(2)


class ReferenceWeight:
    """Implements ``quant.linear_method.PackedWeight``: takes the values of its codes whenever it
    multiplies."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._numbers, self._scales = quantize_rows(weight, weight.shape[1])
        self._bias = bias
        self.num_bytes = (
            self._numbers.nbytes + self._scales.nbytes + (0 if bias is None else bias.nbytes)
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        values = (self._numbers.float() * self._scales).to(torch.bfloat16).to(x.dtype)
        return torch.nn.functional.linear(x, values, self._bias)


class ReferenceLinear:
    """Implements ``quant.linear_method.LinearMethod``."""

    copies = True

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedWeight:
        return ReferenceWeight(weight, bias)


class BlockedLinear:
    """Implements ``quant.linear_method.GatedMethod`` on the blocks of fp8 folders
    (``quant.blocks``)."""

    copies = True

    def __init__(self, kernels: Kernels) -> None:
        self._method = blocks.BlockLinear(kernels)
        self.level = kernels.level

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedWeight:
        return self._method.pack(_blocks(weight), bias)

    def pack_gated(
        self, weight: torch.Tensor, bias: torch.Tensor | None, gate: GateActivation
    ) -> PackedWeight:
        return self._method.pack_gated(_blocks(weight), bias, gate)


def _blocks(weight: torch.Tensor) -> GgufWeight:
    k = weight.shape[1]
    if k % BLOCK:
        raise ConfigError(
            f"--quantization fp8 needs matrices whose inputs are a multiple of {BLOCK} on a CPU;"
            f" this model has one with {k}. Use w8a8_int8."
        )
    numbers, scales = quantize_rows(weight, k)
    return GgufWeight("FP8", block_rows(Numbers(numbers.view(torch.uint8), scales, k), 8, "FP8"))


def create(dtype: torch.dtype) -> BlockedLinear:
    """The method on C++ kernels. Raises KernelsUnavailable with the reason if they cannot run."""
    if dtype != torch.bfloat16:
        raise KernelsUnavailable(f"blocks are multiplied in bfloat16, not {dtype}")
    return BlockedLinear(load())


def create_reference(dtype: torch.dtype) -> ReferenceLinear:
    """The reference method, which runs everywhere."""
    return ReferenceLinear()
