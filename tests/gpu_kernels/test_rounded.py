"""Weights of 8 bits that meet activations of 8 bits: products and experts on Triton, interpreted."""

from __future__ import annotations

import pytest
import torch

from setpoint.engine.kernels.ops import KernelsUnavailable
from setpoint.engine.quant import fp8, rounded, w8a8_int8
from setpoint.engine.quant.grouped import TritonExperts, group
from setpoint.engine.quant.plain import PlainWeight
from setpoint_testing import interpreted_triton as interpreted_triton
from setpoint_testing.fp8_blocks import in_blocks
from setpoint_testing.operation_cases import BF16, FP32

SHAPES = [(48, 128), (100, 72), (130, 320), (16, 16)]
"""Outputs and inputs; torch multiplies fp8 only if both are multiples of 16."""


def values(packed: rounded.RoundedWeight) -> torch.Tensor:
    """The weight in float64."""
    codes, scales = packed.weight.double(), packed.scales.double()
    return (
        codes
        * scales.repeat_interleave(packed.rounding.group or codes.shape[1], 1)[:, : codes.shape[1]]
    )


@pytest.mark.cases(4)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("blocked", [False, True])
def test_fp8_products_match_float64(blocked: bool, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    columns, k = shape
    weight, bias = torch.randn(shape).to(BF16), torch.randn(columns).to(BF16)
    if blocked and k > 128:
        packed = in_blocks(weight.float(), bias)
    else:
        packed = rounded.create_fp8(BF16).pack(weight, bias)
        error = (values(packed) - weight.double()).abs()
        assert (error <= weight.double().abs() / 16 + 1e-3).all()
    for rows in (1, 33):
        x = torch.randn(rows, k).to(BF16)
        group_size = packed.rounding.group or k
        codes, scales = fp8.quantize_rows(x, group_size)
        each = scales.double().repeat_interleave(group_size, 1)[:, :k]
        expected = (codes.double() * each) @ values(packed).T + bias.double()
        found = packed(x)
        assert found.dtype == BF16
        assert ((found.double() - expected).abs() <= expected.abs() / 256 + 1e-4).all()
        exact = x.double() @ weight.double().T + bias.double()
        assert (found.double() - exact).norm() <= 0.05 * exact.norm()


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_int8_products_are_those_of_the_definition(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for shape in SHAPES:
        weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)
        x = torch.randn(21, shape[1]).to(dtype)
        x[3, 5] = torch.nan
        packed = rounded.create_int8(dtype).pack(weight, bias)
        expected = w8a8_int8.ReferenceWeight(weight, bias)(x)
        assert torch.equal(packed(x).nan_to_num(-7), expected.nan_to_num(-7))


@pytest.mark.parametrize("kind", ["plain", "fp8", "blocks", "int8"])
def test_experts_are_products_with_their_weights(kind: str) -> None:
    """Weights are held once, and can be replaced by others."""
    torch.manual_seed(0)
    pack = {
        "plain": PlainWeight,
        "fp8": rounded.create_fp8(BF16).pack,
        "blocks": lambda weight, bias: in_blocks(weight.float(), bias),
        "int8": rounded.create_int8(BF16).pack,
    }[kind]
    weights = [pack(torch.randn(40, 192).to(BF16), torch.randn(40).to(BF16)) for _ in range(5)]
    x, ids = torch.randn(7, 192).to(BF16), torch.randint(0, 4, (7, 2), dtype=torch.int32)
    expected = [
        weights[expert](x[row : row + 1])[0]
        for row, experts in enumerate(ids.tolist())
        for expert in experts
    ]
    before = [weight.weight.clone() for weight in weights]
    grouped = TritonExperts(weights[:4]) if kind == "plain" else group(weights[:4])
    assert isinstance(grouped, TritonExperts)
    assert grouped.num_bytes == sum(weight.num_bytes for weight in weights[:4])
    found = grouped(x, ids)
    assert torch.allclose(found.float(), torch.stack(expected).float(), rtol=2**-7, atol=2e-2)
    storages = {weight.weight.untyped_storage().data_ptr() for weight in weights[:4]}
    assert len(storages) == 1
    stays = next(iter(storages))
    grouped.replace([weights[4], weights[1], weights[0], weights[3]])
    assert weights[4].weight.untyped_storage().data_ptr() == stays
    assert torch.equal(weights[0].weight.view(torch.uint8), before[0].view(torch.uint8))
    moved = torch.tensor([2, 1, 0, 3], dtype=torch.int32)[ids.long()]
    is_there = (ids != 2).flatten()
    assert torch.equal(grouped(x, moved)[is_there], found[is_there])


def test_rows_of_blocks() -> None:
    packed = in_blocks(torch.randn(130, 320), None)
    ids = torch.tensor([3, 129, 0], dtype=torch.int32)
    assert torch.equal(packed.rows(ids, 1.0), values(packed).float().bfloat16()[ids])


def test_fp8_needs_bfloat16_and_a_gpu_that_multiplies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KernelsUnavailable, match="in bfloat16, not"):
        rounded.create_fp8(FP32)
    monkeypatch.setattr(rounded, "require_triton", lambda dtype: 80)
    with pytest.raises(KernelsUnavailable, match=r"capability 8.0, and products of fp8 need 8.9"):
        rounded.create_fp8(BF16)
    monkeypatch.setattr(rounded, "require_triton", lambda dtype: 89)
    rounded.create_fp8(BF16)
    with pytest.raises(KernelsUnavailable, match="only CPUs"):
        rounded.create_blocks(BF16, rounded=True)
