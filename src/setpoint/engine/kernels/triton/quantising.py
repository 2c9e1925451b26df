"""Numbers of activations rounded to 8 bits, a row at a time: to e4m3, with a scale for each row or
for each group of its numbers, or to int8. What is computed is defined in ``quant.fp8`` and
``quant.w8a8_int8``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from setpoint.engine.kernels.triton.fp8 import nearest_codes
from setpoint.engine.kernels.triton.tiles import SEPARATE, blocks, warps, width

LEAST = tl.constexpr(1e-30)
"""``quant.w8a8_int8.TINY``."""


@triton.jit
def _rotated(x, ROUNDS: tl.constexpr, WIDTH: tl.constexpr):
    """Each run of 2^ROUNDS numbers times a Hadamard matrix, in the order of
    ``quant.w8a8_int8.rotate``. A round adds and subtracts neighbours, and moves the bit of a place
    that tells them apart from the lowest of the run to the highest: after all rounds every number
    is where it was."""
    run: tl.constexpr = 1 << ROUNDS
    for _ in tl.static_range(ROUNDS):
        low, high = tl.split(tl.reshape(x, (WIDTH // 2, 2)))
        both = tl.reshape(tl.join(low + high, low - high), (WIDTH // run, run // 2, 2))
        x = tl.reshape(tl.permute(both, (0, 2, 1)), (WIDTH,))
    return x


@triton.jit
def quantise(
    x,  # [T, COLUMNS]
    codes,  # [T, COLUMNS], int8 or the bytes of e4m3, out
    scales,  # fp32 [T, groups], out
    groups,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    ROUNDS: tl.constexpr,  # 2^ROUNDS numbers are rotated together
):
    whole: tl.constexpr = codes.dtype.element_ty == tl.int8
    largest_code: tl.constexpr = 127.0 if whole else 448.0
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < COLUMNS
    values = tl.load(x + row * COLUMNS + column, mask=inside, other=0.0).to(tl.float32)
    if ROUNDS > 0:
        values = _rotated(values, ROUNDS, WIDTH)
    values = tl.reshape(values, (WIDTH // GROUP, GROUP))
    size = tl.abs(values)
    # A NaN is larger than any number here, and is treated like an infinity.
    largest = tl.max(tl.where(size == size, size, float("inf")), 1)
    is_zero, is_finite = largest < LEAST, largest < float("inf")
    divisor = tl.where(is_zero | (largest == float("inf")), 1.0, largest)
    inverse = tl.where(
        is_zero, 0.0, tl.div_rn(tl.full(divisor.shape, largest_code, tl.float32), divisor)
    )
    scale = tl.div_rn(divisor, tl.full(divisor.shape, largest_code, tl.float32))
    scale = tl.where(is_zero, 0.0, tl.where(is_finite, scale, float("nan")))
    values = tl.where(is_finite[:, None], values * inverse[:, None], 0.0)
    values = tl.reshape(values, (WIDTH,))
    # Numbers of this size have no digits behind the point, so the sum is rounded to even.
    rounded = (values + 12582912.0) - 12582912.0
    found = rounded.to(tl.int8) if whole else nearest_codes(values, 3)
    tl.store(codes + row * COLUMNS + column, found, mask=inside)
    group = tl.arange(0, WIDTH // GROUP)
    tl.store(scales + row * groups + group, scale, mask=group < groups)


def quantise_rows(
    x: torch.Tensor, kind: torch.dtype, *, group: int = 0, run: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] -> (codes [T, K] of ``kind``, scales fp32 [T, groups]). kind: int8 or float8_e4m3fn.
    group: numbers that share a scale; 0: all of a row do. run: numbers that are rotated together
    first, a power of two that divides K."""
    assert x.is_contiguous()
    rows, columns = x.shape
    size = max(width(columns), group)
    groups = blocks(columns, group) if group else 1
    codes = torch.empty((rows, columns), dtype=kind, device=x.device)
    scales = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    stored = codes if kind == torch.int8 else codes.view(torch.uint8)
    quantise[(rows,)](
        x, stored, scales, groups, columns, group or size, size,
        run.bit_length() - 1,
        num_warps=warps(size), **SEPARATE,
    )  # fmt: skip
    return codes, scales
