"""Activations rounded in Triton, interpreted, against the definitions: bit for bit."""

from __future__ import annotations

import pytest
import torch

from setpoint.engine.quant import fp8, w8a8_int8
from setpoint_testing import interpreted_triton as interpreted_triton
from setpoint_testing.operation_cases import BF16, FP32

# isort: split
from setpoint.engine.kernels.triton.quantising import quantise_rows

DTYPES = pytest.mark.parametrize("dtype", [BF16, FP32, torch.float16], ids=str)
COLUMNS = (16, 96, 128, 300, 576, 1536)


def rows(columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Ordinary ones, outliers, zeros, tiny and huge ones, and those with numbers that are none."""
    torch.manual_seed(columns)
    x = torch.randn(12, columns)
    x[1, 3] = 300.0
    x[2] = 0.0
    x[3] *= 1e-35
    x[4] *= 1e-20
    x[5] *= 1e30
    x[6, 1], x[7, -1], x[8, 0] = torch.nan, torch.inf, -torch.inf
    x[9] = torch.arange(columns) - columns / 2  # ties
    x[10] = -x[9]
    return x.to(dtype)


@pytest.mark.cases(5)
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("group", [0, 128])
@DTYPES
def test_fp8_is_what_is_defined(dtype: torch.dtype, group: int, columns: int) -> None:
    x = rows(columns, dtype)
    codes, scales = quantise_rows(x, fp8.E4M3, group=group)
    expected, of_groups = fp8.quantize_rows(x, group or columns)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales.nan_to_num(-1), of_groups.nan_to_num(-1))
    assert scales.isnan().any(1).tolist()[6:9] == [True] * 3
    alone, _ = quantise_rows(x[1:2].contiguous(), fp8.E4M3, group=group)
    assert torch.equal(alone.view(torch.uint8)[0], codes.view(torch.uint8)[1])


def test_the_definition_of_fp8() -> None:
    x = torch.tensor([[1.0, -2.0, 448.0, 0.0], [0.5, 0.25, -0.125, 7.0], [2.0**-9, 0, 0, 1]])
    codes, scales = fp8.quantize_rows(x, 2)
    largest = torch.tensor([[2.0, 448.0], [0.5, 7.0], [2.0**-9, 1.0]])
    assert torch.equal(scales, largest / 448)
    assert codes.float().tolist() == [[224, -448, 448, 0], [448, 224, -8, 448], [448, 0, 0, 448]]
    weight = torch.randn(9, 200)
    codes, scales = fp8.quantize_rows(weight, 200)
    error = (codes.double() * scales.double() - weight.double()).abs()
    largest = weight.abs().amax(1, keepdim=True).double()
    assert (error <= (weight.double().abs() / 16).clamp(min=largest / 448 / 1024)).all()


@pytest.mark.cases(4)
@pytest.mark.parametrize("columns", COLUMNS)
@DTYPES
def test_int8_is_what_is_defined(dtype: torch.dtype, columns: int) -> None:
    x = rows(columns, dtype)
    codes, scales = quantise_rows(x, torch.int8, run=w8a8_int8.block_size(columns))
    expected, of_rows = w8a8_int8.quantize_rows(w8a8_int8.rotate(x.float()))
    assert torch.equal(codes, expected)
    assert torch.equal(scales[:, 0].nan_to_num(-1), of_rows.nan_to_num(-1))
