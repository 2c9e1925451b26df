"""RMS norms. A program normalises a tile of whole rows, so that a mean never leaves its program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from setpoint.engine.kernels.triton.tiles import BLOCK, SEPARATE, blocks, warps, width


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_rows(
    x,  # rows of COLUMNS, GROUP of them side by side, the groups ``stride`` apart
    residual,  # [num_rows, COLUMNS], in and out
    weight,  # [COLUMNS]
    out,  # [num_rows, COLUMNS]
    num_rows,
    stride,
    eps,
    offset,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    ADDS: tl.constexpr,  # whether there is a residual
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    inside = (rows < num_rows)[:, None] & (columns < COLUMNS)[None, :]
    source = (rows // GROUP * stride + rows % GROUP * COLUMNS)[:, None] + columns[None, :]
    target = rows[:, None] * COLUMNS + columns[None, :]
    values = tl.load(x + source, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        values += tl.load(residual + target, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(residual.dtype.element_ty)
        tl.store(residual + target, rounded, mask=inside)
        values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 1) / COLUMNS + eps)
    factors = tl.load(weight + columns, mask=columns < COLUMNS, other=0.0).to(tl.float32) + offset
    normed = values * scale[:, None] * factors[None, :]
    tl.store(out + target, normed.to(out.dtype.element_ty), mask=inside)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> torch.Tensor:
    """See ``Ops.rms_norm``."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, out, eps, offset)
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``Ops.add_rms_norm``. x becomes the norm and residual the sum."""
    assert residual.shape == x.shape
    assert residual.dtype == x.dtype
    assert residual.is_contiguous()
    assert x.is_contiguous()
    _launch(x, residual, weight, x, eps, offset)
    return x, residual


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    offset: float,
) -> None:
    tokens, *heads, columns = x.shape
    group = heads[0] if heads else 1
    assert x.stride()[1:] == ((columns, 1) if heads else (1,))
    span = width(columns)
    rows = max(BLOCK // span, 1)
    rms_norm_rows[(blocks(tokens * group, rows),)](
        x, residual, weight, out, tokens * group, x.stride(0), eps, offset, group, columns, rows,
        span, residual is not None, num_warps=warps(rows * span), **SEPARATE,
    )  # fmt: skip
