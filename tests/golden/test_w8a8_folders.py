"""int8 weights of a checkpoint with activations in 8 bits: the kernel against the definition."""

from __future__ import annotations

import pytest
import torch

from setpoint.engine.kernels.ops import SILU
from setpoint.engine.quant import blocks as block_linear
from setpoint.engine.quant.linear_method import GgufWeight
from setpoint.engine.quant.quantised_numbers import Numbers, w8a8_rows
from setpoint_testing.cpu_levels import each_level

BF16 = torch.bfloat16
ROWS = (1, 2, 9, 64)


def weight_of(columns: int, k: int) -> Numbers:
    return Numbers(
        torch.randint(0, 256, (columns, k), dtype=torch.uint8), torch.rand(columns, 1) * 0.01, k
    )


def expected(weight: Numbers, x: torch.Tensor, scale: float) -> torch.Tensor:
    """fp32."""
    x = x.float()
    if scale:
        scales = torch.full((len(x), 1), scale)
        rounded = (x / scales).clamp(-128, 127).round()
    else:
        largest = x.abs().amax(1, keepdim=True)
        inverse, scales = torch.full_like(largest, 127) / largest, largest / 127
        rounded = (x * inverse).round()
    sums = rounded.double() @ (weight.codes.double() - 128).T
    return sums.float() * (weight.scales.T * scales)


@each_level
@pytest.mark.parametrize("scale", [0.0, 0.013])
@pytest.mark.parametrize(("columns", "k"), [(33, 64), (70, 576), (96, 44)])
def test_products_are_the_definition(columns: int, k: int, scale: float, level: str) -> None:
    torch.manual_seed(columns)
    weight, x, bias = weight_of(columns, k), torch.randn(64, k).to(BF16), torch.randn(columns)
    stored = GgufWeight("W8A8", w8a8_rows(weight, scale))
    method = block_linear.create(BF16, level=level)
    plain, biased = (method.pack_stack([stored], b) for b in (None, bias.to(BF16)))
    for rows in ROWS:
        sums = expected(weight, x[:rows], scale)
        assert torch.equal(plain(x[:rows]), sums.to(BF16))
        with_bias = (sums + bias.to(BF16).float()).to(BF16)
        assert torch.allclose(biased(x[:rows]).float(), with_bias.float(), rtol=1e-2, atol=1e-2)


@each_level
def test_gates_are_applied_to_the_sums(level: str) -> None:
    torch.manual_seed(1)
    weight, x = weight_of(70, 96), torch.randn(9, 96).to(BF16)
    gated = block_linear.create(BF16, level=level).pack_gated(
        GgufWeight("W8A8", w8a8_rows(weight, 0.0)), None, SILU
    )
    gate, up = expected(weight, x, 0.0).chunk(2, dim=1)
    theirs = (torch.nn.functional.silu(gate) * up).to(BF16)
    assert torch.allclose(gated(x).float(), theirs.float(), rtol=2e-2, atol=1e-4)


def test_a_row_without_numbers_gives_none() -> None:
    weight, x = weight_of(33, 64), torch.randn(3, 64).to(BF16)
    x[1, 5] = torch.nan
    for scale in (0.0, 0.5):
        packed = block_linear.create(BF16).pack_stack(
            [GgufWeight("W8A8", w8a8_rows(weight, scale))], None
        )
        found = packed(x)
        assert found[1].isnan().all()
        assert torch.equal(found[::2], packed(x[::2].contiguous()))
