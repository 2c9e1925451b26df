"""The operations in Triton, interpreted, against the reference: norms, activations, and choices among
tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from setpoint.engine.kernels.ref import RefOps
from setpoint_testing import interpreted_triton as interpreted_triton
from setpoint_testing.operation_cases import (
    BF16,
    FP32,
    ROWS_COLUMNS,
    VOCABULARIES,
    close,
    with_ties_and_nan,
)

# isort: split
from setpoint.engine.kernels.triton.ops import create

REF, OPS = RefOps(), create(BF16)
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
LARGE = 152_064
"""A vocabulary that many programs share."""


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """The same bits; NaN is NaN."""
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def alone(operation: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> bool:
    """Whether each row has the bits that it has without the others."""
    together = operation(x.clone())
    rows = range(0, len(x), max(len(x) // 5, 1))
    return all(same(operation(x[row : row + 1].clone())[0], together[row]) for row in rows)


@pytest.mark.cases(4)
@pytest.mark.parametrize("size", ROWS_COLUMNS, ids=str)
@DTYPES
def test_norms_match_the_reference(dtype: torch.dtype, size: tuple[int, int]) -> None:
    rows, columns = size
    torch.manual_seed(rows * columns)
    x, residual = (torch.randn(rows, columns).mul(3).to(dtype) for _ in range(2))
    weight, before = torch.rand(columns).add(0.5).to(dtype), x.clone()
    for offset in (0.0, 1.0):
        expected = REF.rms_norm(x, weight, 1e-5, offset)
        assert close(OPS.rms_norm(x, weight, 1e-5, offset), expected, dtype)
        assert torch.equal(x, before)
        expected, expected_sum = REF.add_rms_norm(x, residual, weight, 1e-5, offset)
        normed, summed = OPS.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5, offset)
        assert torch.equal(summed, expected_sum)
        assert close(normed, expected, dtype)
        assert torch.equal(normed, OPS.rms_norm(summed, weight, 1e-5, offset))  # after rounding
    heads = torch.randn(rows, 5, columns).to(dtype)[:, 1:4]  # strided, as they come from a product
    assert close(OPS.rms_norm(heads, weight, 1e-5), REF.rms_norm(heads, weight, 1e-5), dtype)
    assert alone(lambda x: OPS.rms_norm(x, weight, 1e-5), x)
    assert alone(lambda x: OPS.add_rms_norm(x, x.clone(), weight, 1e-5)[0], x)
    assert alone(lambda x: OPS.rms_norm(x, weight, 1e-5), heads)


def test_a_norm_of_a_row_with_nan_leaves_the_others() -> None:
    x, weight = torch.randn(9, 128).to(BF16), torch.ones(128).to(BF16)
    expected = OPS.rms_norm(x, weight, 1e-5)
    x[4, 7] = torch.nan
    found = OPS.rms_norm(x, weight, 1e-5)
    assert found[4].isnan().all()
    assert torch.equal(found[[0, 3, 5, 8]], expected[[0, 3, 5, 8]])


@pytest.mark.parametrize("columns", [1, 131, 4096, 5003, LARGE])
def test_sums_of_exponentials_match_the_reference(columns: int) -> None:
    """Also of rows with NaN and infinities, which leave the others as they are."""
    torch.manual_seed(columns)
    logits = torch.randn(9, columns).mul(4)
    logits[2], logits[3, -1], logits[4, 0] = -torch.inf, torch.nan, torch.inf
    found = OPS.log_sum_exp(logits)
    torch.testing.assert_close(
        found, logits.double().logsumexp(1, keepdim=True).float(), equal_nan=True
    )
    assert found[2].item() == -torch.inf
    assert alone(OPS.log_sum_exp, logits)


@pytest.mark.cases(4)
@pytest.mark.parametrize("size", ROWS_COLUMNS, ids=str)
@DTYPES
def test_activations_match_the_reference(dtype: torch.dtype, size: tuple[int, int]) -> None:
    rows, columns = size
    torch.manual_seed(rows * columns)
    gate_up = torch.randn(rows, 2 * columns).mul(4).to(dtype)
    gate_up[0, :5] = torch.tensor([0.0, 200.0, -200.0, -90.0, 1e-4]).to(dtype)
    assert close(OPS.silu_mul(gate_up), REF.silu_mul(gate_up), dtype)
    # In fp32 torch's own 1 + tanh loses the digits of small results.
    assert close(OPS.gelu_tanh_mul(gate_up), REF.gelu_tanh_mul(gate_up.double()), dtype)
    for clamped in ((1.702, 7.0), (1.702, 1.5)):
        found = OPS.clamped_swiglu_mul(gate_up, *clamped)
        assert close(found, REF.clamped_swiglu_mul(gate_up, *clamped), dtype)
    gate_up[-1, : 2 * columns : 3] = torch.nan
    for name, given in (
        ("silu_mul", ()),
        ("gelu_tanh_mul", ()),
        ("clamped_swiglu_mul", (1.7, 1.5)),
    ):
        found, expected = (getattr(ops, name)(gate_up, *given) for ops in (OPS, REF))
        assert torch.equal(found.isnan(), expected.isnan())
    ids = torch.randint(0, rows, (9,), dtype=torch.int32)
    for scale in (1.0, 73.3):
        found = OPS.embedding(ids, gate_up, scale)
        assert same(found, REF.embedding(ids, gate_up, scale))


@DTYPES
def test_caps_match_the_reference(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 1536) * 10 ** torch.linspace(-6, 3, 1536)
    logits[1, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0])
    logits = logits.to(dtype)
    for cap in (30.0, 1.5):
        found, expected = OPS.soft_cap(logits.clone(), cap), REF.soft_cap(logits.double(), cap)
        tolerance = 2**-8 if dtype == BF16 else 1e-6
        assert torch.allclose(found.double(), expected, rtol=tolerance, atol=0, equal_nan=True)
        assert alone(lambda x, cap=cap: OPS.soft_cap(x, cap), logits)


@pytest.mark.cases(6)
@pytest.mark.parametrize("columns", VOCABULARIES)
@DTYPES
def test_tokens_are_chosen_as_the_reference_does(columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(columns)
    logits = with_ties_and_nan(columns, dtype)
    found = OPS.best_tokens(logits)
    assert found.dtype == torch.int64
    assert torch.equal(found, REF.best_tokens(logits))
    words = torch.randint(-(1 << 31), 1 << 31, (3, columns // 32 + 2)).int()
    words[1] = torch.tensor([0, -1])[torch.randint(0, 2, (columns // 32 + 2,))]
    which, ours, theirs = torch.tensor([11, 0, 7]), logits.clone(), logits.clone()
    OPS.mask_tokens(ours, which, words)
    REF.mask_tokens(theirs, which, words)
    assert same(ours, theirs)
    numbers = logits[[0, 4, 5, 6, 7, 8]] * torch.tensor([1.0, -1])[torch.randint(0, 2, (columns,))]
    for count in {1, min(5, columns), columns}:
        found = OPS.top_tokens(numbers.nan_to_num(0.5), count)
        assert torch.equal(found, REF.top_tokens(numbers.nan_to_num(0.5), count))
        assert torch.equal(found[:, :1], OPS.top_tokens(numbers.nan_to_num(0.5), 1))
    assert all(len(set(row)) == columns for row in OPS.top_tokens(logits, columns).tolist())


@pytest.mark.cases(1)
@DTYPES
def test_a_large_vocabulary_is_shared_by_programs(dtype: torch.dtype) -> None:
    """The first of equal maxima, wherever the programs' parts begin."""
    torch.manual_seed(1)
    logits = torch.randn(8, LARGE + 8).to(dtype)[:, :LARGE]  # rows are strided
    for row, places in enumerate(((0,), (LARGE - 1,), (4095, 4096), (70_000, 9), (8191, 8192))):
        logits[row, list(places)] = 50.0
    logits[5, 100_000], logits[6, 151_000], logits[7, 3] = torch.nan, torch.inf, -torch.inf
    expected = [0, LARGE - 1, 4095, 9, 8191, -1, -1]
    found = OPS.best_tokens(logits)
    assert found.tolist() == [*expected, int(REF.best_tokens(logits[7:]))]
    assert alone(OPS.best_tokens, logits)
    assert torch.equal(OPS.top_tokens(logits[:2], 20), REF.top_tokens(logits[:2], 20))


def test_tokens_are_placed_as_the_reference_does() -> None:
    torch.manual_seed(2)
    ids = {"dtype": torch.int32}
    known, pages = torch.randint(0, 999, (9, 400), **ids), torch.randint(0, 99, (9, 140), **ids)
    for page, lengths, counts in (
        (3, (17, 6, 39), (1, 6, 39)),
        (16, (1,), (1,)),
        (1, (100, 7), (90, 7)),
        (4, tuple(range(1, 301)), (1,) * 300),  # more rows than are compared at a time
    ):
        slots = torch.randint(0, 9, (len(lengths),), **ids)
        cu_q = torch.tensor([0, *itertools.accumulate(counts)], **ids)
        given = (slots, cu_q, torch.tensor(lengths, **ids), known, pages, page, sum(counts))
        for ours, theirs in zip(OPS.place_tokens(*given), REF.place_tokens(*given), strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)


def test_padding_is_placed_in_page_0() -> None:
    """Rows of the length 0, and tokens after those of all rows."""
    ids = {"dtype": torch.int32}
    known, pages = torch.full((2, 8), 5, **ids), torch.full((2, 4), 3, **ids)
    slots, cu_q = torch.tensor([1, 0, 0], **ids), torch.tensor([0, 2, 3, 4], **ids)
    kv_lens = torch.tensor([4, 0, 0], **ids)
    found, positions, kv_index = OPS.place_tokens(slots, cu_q, kv_lens, known, pages, 2, 70)
    assert found.tolist() == [5, 5] + [0] * 68
    assert positions.tolist() == [2, 3] + [-1] * 68
    assert kv_index.tolist() == [6, 7] + [0] * 68
