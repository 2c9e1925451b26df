"""A matrix in fp8 with a scale for each block of 128 × 128, as a GPU gets it from a folder."""

from __future__ import annotations

import torch

from setpoint.engine.quant import fp8, rounded
from setpoint.engine.quant.linear_method import GgufWeight
from setpoint.engine.quant.quantised_numbers import Numbers, block_rows


def in_blocks(weight: torch.Tensor, bias: torch.Tensor | None) -> rounded.RoundedWeight:
    """weight: fp32 [N, K]."""
    columns, k = weight.shape
    groups = weight.split(128)
    scales = torch.cat(
        [
            torch.stack([each.abs().amax() / 448 for each in rows.split(128, 1)]).expand(
                len(rows), -1
            )
            for rows in groups
        ]
    )
    each = scales.repeat_interleave(128, 1)[:, :k]
    codes = (weight / each).to(fp8.E4M3).view(torch.uint8)
    rows = block_rows(Numbers(codes, scales.contiguous(), 128), 8, "FP8")
    method = rounded.create_blocks(torch.bfloat16, rounded=False)
    packed = method.pack_stack([GgufWeight("FP8", rows)], bias)
    assert packed.scales.shape == (columns, -(-k // 128))
    return packed
