"""Activations of gated MLPs: the products with gate and up, side by side, become one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from setpoint.engine.kernels.triton.tiles import BLOCK, SEPARATE, blocks

SILU, GELU_TANH, CLAMPED_SWIGLU = range(3)
ROOT_2_PI = tl.constexpr(0.7978845608028654)


@triton.jit
def gate_rows(
    gate_up,  # [T, 2 columns]
    out,  # [T, columns]
    columns,
    alpha,
    limit,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    at = gate_up + row * 2 * columns + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + columns, mask=inside, other=0.0).to(tl.float32)
    if KIND == 0:
        value = gate / (1.0 + tl.exp(-gate)) * up
    elif KIND == 1:
        # (1 + tanh(x)) / 2 is the sigmoid of 2 x, which keeps the digits of small results.
        bent = (gate + gate * gate * gate * 0.044715) * ROOT_2_PI
        value = gate / (1.0 + tl.exp(bent * -2.0)) * up
    else:
        gate = tl.where(gate > limit, limit, gate)  # comparisons that fail keep NaN
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        value = gate / (1.0 + tl.exp(gate * -alpha)) * (up + 1.0)
    tl.store(out + row * columns + column, value.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See ``Ops.silu_mul``."""
    return _gated(gate_up, SILU)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See ``Ops.gelu_tanh_mul``."""
    return _gated(gate_up, GELU_TANH)


def clamped_swiglu_mul(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """See ``Ops.clamped_swiglu_mul``."""
    return _gated(gate_up, CLAMPED_SWIGLU, alpha, limit)


def _gated(
    gate_up: torch.Tensor, kind: int, alpha: float = 0.0, limit: float = 0.0
) -> torch.Tensor:
    assert gate_up.is_contiguous()
    tokens, columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, columns), dtype=gate_up.dtype, device=gate_up.device)
    gate_rows[(tokens, blocks(columns))](
        gate_up, out, columns, alpha, limit, kind, BLOCK, num_warps=4, **SEPARATE
    )
    return out
