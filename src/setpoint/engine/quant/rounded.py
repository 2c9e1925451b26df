"""Linear layers with weights of 8 bits and activations of 8 bits on GPUs: fp8 (``quant.fp8``) and
int8 (``quant.w8a8_int8``). Activations are rounded by a kernel in Triton. Has not run on a GPU.

Weights in fp8 with a scale for each output are multiplied by torch; the others, and int8, by the
kernel in Triton that multiplies experts (kernels/triton/grouped.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from setpoint.core.errors import CheckpointError
from setpoint.engine.kernels.ops import KernelsUnavailable
from setpoint.engine.kernels.triton.availability import E4M3_CAPABILITY, require_triton
from setpoint.engine.quant import fp8, w8a8_int8
from setpoint.engine.quant.linear_method import GgufWeight
from setpoint.engine.quant.plain import PlainWeight
from setpoint.engine.quant.quantised_numbers import BLOCK

GROUP = 128
"""Inputs that share a scale where those of a row do not all."""
ALIGNED = 16
"""torch multiplies fp8 matrices whose sizes are multiples of this."""


class RoundedWeight(PlainWeight):
    """Implements ``quant.linear_method.PackedRows``; its results are in bf16 or, of int8, in x's
    dtype."""

    def __init__(
        self, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        """codes: e4m3 or int8 [N, K]. scales: fp32 [N, G]; G is 1, or K / GROUP rounded up."""
        super().__init__(codes, bias)
        self.scales = scales
        self.num_bytes += scales.nbytes
        self.rounding = Rounding(codes, scales)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.rounding.multiplied_by_torch:
            codes, scales = self.rounding(x)
            return torch._scaled_mm(
                codes, self.weight.t(), scales, self.scales.t(), self.bias, out_dtype=x.dtype
            )
        return self._multiplied(x, fixed=False)

    def invariant(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiplied(x, fixed=True)

    def _multiplied(self, x: torch.Tensor, *, fixed: bool) -> torch.Tensor:
        from setpoint.engine.kernels.triton.grouped import Scales, multiply_pairs

        codes, scales = self.rounding(x)
        return multiply_pairs(
            codes,
            self.weight.unsqueeze(0),
            None,
            dtype=x.dtype,
            biases=self.bias,
            scales=Scales(scales, self.scales),
            fixed=fixed,
        )

    def rows(self, ids: torch.Tensor, scale: float) -> torch.Tensor:
        codes, scales = self.weight[ids].float(), self.scales[ids]
        k, group = codes.shape[1], self.rounding.group or codes.shape[1]
        values = (codes * scales.repeat_interleave(group, 1)[:, :k]).bfloat16()
        return values * torch.tensor(scale, device="cpu").bfloat16().item()


class Rounding:
    """Rounds activations [T, K] for a weight: -> (codes [T, K], scales [T, G])."""

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        k = codes.shape[1]
        self._kind = codes.dtype
        self.group = 0 if scales.shape[1] == 1 else GROUP
        self._run = w8a8_int8.block_size(k) if codes.dtype == torch.int8 else 1
        is_aligned = not any(size % ALIGNED for size in codes.shape)
        self.multiplied_by_torch = is_aligned and not self.group and self._kind == fp8.E4M3

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        from setpoint.engine.kernels.triton.quantising import quantise_rows

        return quantise_rows(x, self._kind, group=self.group, run=self._run)


class Fp8Linear:
    """Implements ``quant.linear_method.LinearMethod``."""

    copies = True

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> RoundedWeight:
        return RoundedWeight(*fp8.quantize_rows(weight, weight.shape[1]), bias)


class Int8Linear:
    """Implements ``quant.linear_method.LinearMethod``."""

    copies = True

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> RoundedWeight:
        assert weight.shape[1] < w8a8_int8.MAX_K
        numbers, scales = w8a8_int8.quantize_weight(weight)
        return RoundedWeight(numbers, scales.unsqueeze(1), bias)


class Fp8Blocks:
    """Implements ``quant.linear_method.BlockMethod`` for the codes of fp8 folders."""

    kinds = rounds = frozenset(("FP8",))

    def pack(self, blocks: GgufWeight, bias: torch.Tensor | None) -> RoundedWeight:
        rows = blocks.rows.view(len(blocks.rows), -1, 4 + BLOCK)
        scales = rows[..., :4].contiguous().view(torch.float32).squeeze(2)
        codes = rows[..., 4:].flatten(1).view(fp8.E4M3)
        if bool((scales == scales[:, :1]).all()):
            return RoundedWeight(codes, scales[:, :1].contiguous(), bias)
        of_groups = scales[:, :: GROUP // BLOCK].contiguous()
        each = of_groups.repeat_interleave(GROUP // BLOCK, 1)[:, : scales.shape[1]]
        if not torch.equal(each, scales):
            raise CheckpointError(
                f"A matrix in fp8 has a scale for fewer than {GROUP} inputs, by which GPUs do not"
                " multiply here; --quantization unquant dequantizes it."
            )
        return RoundedWeight(codes, of_groups, bias)

    def pack_stack(self, stack: Sequence[GgufWeight], bias: torch.Tensor | None) -> RoundedWeight:
        (blocks,) = stack  # neighbours of one kind are together
        return self.pack(blocks, bias)


def create_fp8(dtype: torch.dtype) -> Fp8Linear:
    """The method for fp8. Raises KernelsUnavailable with the reason if it cannot run."""
    _require_fp8(dtype)
    return Fp8Linear()


def create_int8(dtype: torch.dtype) -> Int8Linear:
    """The method for int8. Raises KernelsUnavailable with the reason if it cannot run."""
    require_triton(dtype)
    return Int8Linear()


def create_blocks(dtype: torch.dtype, *, rounded: bool) -> Fp8Blocks:
    """The method for the codes of fp8 folders. Raises KernelsUnavailable with the reason if it
    cannot run. rounded: whether activations of int8 are asked for."""
    if rounded:
        raise KernelsUnavailable("only CPUs multiply blocks by activations of int8")
    _require_fp8(dtype)
    return Fp8Blocks()


def _require_fp8(dtype: torch.dtype) -> None:
    if dtype != torch.bfloat16:
        raise KernelsUnavailable(f"products of fp8 are in bfloat16, not {dtype}")
    capability = require_triton(dtype)
    if 0 < capability < E4M3_CAPABILITY:
        raise KernelsUnavailable(
            f"the GPU has compute capability {capability / 10}, and products of fp8 need"
            f" {E4M3_CAPABILITY / 10}"
        )
