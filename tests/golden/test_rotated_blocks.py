"""Products of a GGUF's blocks with many rows (``--quantization blocks_int8``): equal to those of a
reference in numpy at every level, for any number of rows and threads, and close to those in
bf16."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from test_gguf_blocks import quantised, row_of
from test_rounded_blocks import BF16, KINDS, activations
from test_rounded_blocks import reference as of_few_rows

from setpoint.core.model import BLOCK_KINDS
from setpoint.engine.kernels.ops import SILU
from setpoint.engine.quant import blocks as block_linear
from setpoint.engine.quant import grouped
from setpoint.engine.quant.linear_method import GgufWeight
from setpoint.engine.quant.w8a8_int8 import block_size, quantize_rows, rotate
from setpoint_testing.cpu_levels import each_level

F32 = np.float32
MANY = 24
"""Rows from which on products are those of this module (rounded_blocks.h, kManyRows)."""
SPAN = 64
UNITS, FRACTION = F32(508), 128
LIMITS = {"Q4_0": (-8, 7), "Q4_1": (0, 15), "Q8_0": (-128, 127), "Q4_K": (0, 15), "Q6_K": (-32, 31)}
"""Least and greatest code of a kind."""


def shares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a * b / 2^15, rounded, halves upwards."""
    assert all(each.min() >= -(2**15) and each.max() < 2**15 for each in (a, b))
    return (a.astype(np.int64) * b + 0x4000) >> 15


def numbers(raw: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Raw rows -> scales, minimums and codes, [N, K]: a value is scale * code - minimum. The oracle
    is the gguf package, which gets blocks whose codes are all the same."""
    block = BLOCK_KINDS[kind]
    blocks = raw.reshape(len(raw), -1, block.num_bytes)

    def dequantised(code: int | None, fields: tuple[bool, bool]) -> np.ndarray:
        chosen = blocks.copy()
        for at, kept in zip(block.scales, fields, strict=False):
            if not kept:
                chosen[..., at : at + 2] = 0
        if code is not None:
            fill(chosen, kind, code)
        return gguf.dequantize(chosen.reshape(len(raw), -1), Kind[kind])

    scale = dequantised(1, (True, False))
    minimum = -dequantised(0, (False, True)) if len(block.scales) > 1 else 0 * scale
    values = dequantised(None, (True, False)).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(scale == 0, 0, values / scale)
    assert np.array_equal(codes, codes.round())
    return scale, minimum, codes.astype(np.int64)


def fill(blocks: np.ndarray, kind: str, code: int) -> None:
    """Makes every code the same."""
    code -= LIMITS[kind][0]
    if kind == "Q6_K":
        blocks[..., :128] = (code & 15) * 17
        blocks[..., 128:192] = (code >> 4) * 0x55
    elif kind == "Q8_0":
        blocks[..., 2:] = (code - 128) & 255
    else:
        blocks[..., {"Q4_0": 2, "Q4_1": 4, "Q4_K": 16}[kind] :] = code * 17


def weights(blocks: GgufWeight) -> tuple[np.ndarray, np.ndarray]:
    """Codes [N, K] and scales [N, spans] of a weight: in a span weights become whole units, of
    which the largest possible one has UNITS; runs are rotated; the largest sum becomes 127."""
    scale, minimum, code = numbers(blocks.rows.numpy(), blocks.kind)
    columns, k = scale.shape
    run = block_size(k)
    all_codes, all_scales = [], []
    for at in range(0, k, SPAN):
        part = np.s_[:, at : at + SPAN]
        s, m, q = scale[part], minimum[part], code[part]
        most = np.maximum(*(np.abs(s * F32(limit) - m) for limit in LIMITS[blocks.kind])).max(1)
        with np.errstate(divide="ignore"):
            unit = np.where(most < F32(1e-30), F32(0), UNITS / most)[:, None]
        t = shares(q * 256, np.rint(s * unit * F32(FRACTION)).astype(np.int64))
        t -= np.rint(m * unit).astype(np.int64)
        hadamard = np.ones((1, 1), np.int64)
        while len(hadamard) < run:
            hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
        v = (t.reshape(columns, -1, run) @ hadamard).reshape(t.shape)
        peak = np.maximum(np.abs(v).max(1), 128).astype(F32)
        factor = (F32(127 * 0x8000) / peak).astype(np.int64)
        all_codes.append(shares(v, factor[:, None]))
        with np.errstate(divide="ignore"):
            own = F32(0x8000 / run) / (factor.astype(F32) * unit[:, 0])
        all_scales.append(np.where(unit[:, 0] > 0, own, F32(0)))
    codes = np.concatenate(all_codes, 1)
    assert np.abs(codes).max() <= 127
    return codes, np.stack(all_scales, 1)


def expected_of(x: torch.Tensor, blocks: GgufWeight) -> torch.Tensor:
    """Sums of integers over a span; then in fp32, span after span."""
    codes, scales = weights(blocks)
    rotated = rotate(x.float())
    sums = np.zeros((len(x), len(codes)), F32)
    for i, part in enumerate(rotated.split(SPAN, 1)):
        of_row, row_scale = quantize_rows(part)
        total = of_row.numpy().astype(np.int64) @ codes[:, i * SPAN : (i + 1) * SPAN].T
        sums = sums + (scales[:, i] * row_scale.numpy()[:, None]) * total.astype(F32)
    assert sums.dtype == F32
    return torch.from_numpy(sums).to(BF16)


@pytest.mark.cases(20)
@each_level
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("columns", "num_blocks"), [(1, 2), (33, 3), (96, 18), (70, 19)])
def test_a_product_is_that_of_the_reference(
    columns: int, num_blocks: int, kind: str, level: str
) -> None:
    torch.manual_seed(columns)
    k = max(row_of(kind, num_blocks), 64)
    blocks, weight = quantised(kind, columns, k)
    x = activations(300, k)
    ours = block_linear.create(BF16, level=level, rounded=True).pack(blocks, None)
    expected = expected_of(x, blocks)
    for rows in (MANY, 25, 47, 48, 49, 64, 97, 300):
        assert torch.equal(ours(x[:rows]), expected[:rows]), rows
        assert torch.equal(ours(x[-rows:]), expected[-rows:]), rows
    exact = x.double() @ weight.double().T
    error = (expected.double() - exact)[3:]
    assert error.norm() <= 0.02 * x[3:].double().norm() * weight.double().norm() / columns**0.5


def test_the_number_of_rows_decides_how_they_are_multiplied() -> None:
    blocks, _ = quantised("Q4_K", 40, 512)
    ours = block_linear.create(BF16, rounded=True).pack(blocks, None)
    x = activations(MANY, 512)
    few, many = of_few_rows(x, blocks), expected_of(x, blocks)
    assert not torch.equal(few, many)
    assert torch.equal(ours(x[1:]), few[1:])
    assert torch.equal(ours(x), many)


@each_level
@pytest.mark.parametrize("kind", KINDS)
def test_gate_bias_and_stack_see_the_same_sums(kind: str, level: str) -> None:
    """A gated product is that of its two halves; a bias is added to the sum in fp32."""
    k = row_of(kind, 3)
    method = block_linear.create(BF16, level=level, rounded=True)
    blocks, _ = quantised(kind, 70, k)
    x, bias = activations(70, k), torch.randn(70).to(BF16)
    gated = method.pack_gated(blocks, bias, SILU)
    for rows in (MANY, 50):
        assert torch.equal(gated(x[:rows]), gated(x)[:rows])
    halves = (method.pack(blocks, bias)(x)).float()
    expected = torch.nn.functional.silu(halves[:, :35]) * halves[:, 35:]
    torch.testing.assert_close(gated(x).float(), expected, rtol=0.05, atol=0.05)
    other, _ = quantised("Q8_0", 33, k, seed=2)
    stack = method.pack_stack([blocks, other], None)
    assert torch.equal(stack(x)[:, :70], method.pack(blocks, None)(x))
    assert torch.equal(stack(x)[:, 70:], method.pack(other, None)(x))


@each_level
@pytest.mark.parametrize("kind", KINDS)
def test_extreme_codes_and_scales(kind: str, level: str) -> None:
    """All codes and factors the same, at either end; a column of zeros; the largest rotated sums."""
    block = BLOCK_KINDS[kind]
    x = activations(MANY, 1024)
    for byte in (0, 0x7F, 0x80, 0xFF):
        raw = np.full((33, 1024 // block.num_values, block.num_bytes), byte, np.uint8)
        for i, number in enumerate((0.01, -0.02)[: len(block.scales)]):
            at = block.scales[i]
            raw[..., at : at + 2] = np.array([number], np.float16).view(np.uint8)
            raw[5, :, at : at + 2] = 0
        blocks = GgufWeight(kind, torch.from_numpy(raw.reshape(33, -1)))
        ours = block_linear.create(BF16, level=level, rounded=True).pack(blocks, None)
        assert torch.equal(ours(x), expected_of(x, blocks)), byte


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K"])
def test_experts_and_threads_change_no_bit(kind: str) -> None:
    """An expert multiplies its own rows together, many or few of them."""
    before, k = torch.get_num_threads(), row_of(kind, 2)
    method = block_linear.create(BF16, rounded=True)
    packed = [method.pack(quantised(kind, 64, k, seed)[0], None) for seed in range(3)]
    x = torch.randn(80, k).to(BF16)
    ids = torch.tensor([[0, row % 5 // 4 + 1] for row in range(80)], dtype=torch.int32)
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found = grouped.group(packed)(x, ids).view(80, 2, -1)
            for expert in range(3):
                rows, places = (ids == expert).nonzero(as_tuple=True)
                assert torch.equal(found[rows, places], packed[expert](x[rows]))
    finally:
        torch.set_num_threads(before)


def test_what_is_multiplied_as_integers_says_so() -> None:
    """For ``bench one-batch --breakdown``."""
    method = block_linear.create(BF16, rounded=True)
    four, six, five = (quantised(kind, 32, 256)[0] for kind in ("Q4_K", "Q6_K", "Q5_K"))
    assert method.pack_stack([four, six], None).product == "int8"
    assert not hasattr(method.pack_stack([four, five], None), "product")
    assert grouped.group([method.pack(four, None)] * 2).product == "int8"
    assert not hasattr(grouped.group([method.pack(five, None)] * 2), "product")
