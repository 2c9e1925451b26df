"""The C++ attention against its definition: every shape of batch, bit for bit where the order of
sums is the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from setpoint_testing.attention_problems import (
    VARIANTS,
    Case,
    Problem,
    Row,
    make_batch,
    make_problem,
    random_rows,
    relative_error,
)
from setpoint_testing.cpu_levels import all_levels, each_level

BF16, FP32 = torch.bfloat16, torch.float32
CASES = [
    Case(9, 3, 64, 1, random_rows(0, 12, 700)),
    Case(
        9,
        3,
        64,
        16,
        (Row(1, 1), Row(1, 128), Row(1, 129), Row(127, 127), Row(129, 129), Row(22, 300)),
    ),
    Case(4, 4, 16, 4, random_rows(1, 70, 60)),
    Case(8, 4, 32, 64, random_rows(2, 5, 400)),
    Case(8, 2, 80, 16, random_rows(3, 6, 300)),
    Case(6, 3, 96, 1, random_rows(4, 6, 300)),
    Case(8, 1, 128, 16, random_rows(5, 4, 500)),
    Case(3, 1, 48, 4, (Row(1, 1500), Row(3, 1400))),
    Case(2, 2, 112, 16, (Row(200, 1500),)),
    # Shared prefixes: inside a block, ending in one, with rows that are shorter, and more query
    # rows than one item takes.
    Case(
        9,
        3,
        64,
        1,
        (*(Row(1, 300 + i) for i in range(40)), Row(12, 400), Row(5, 60), Row(100, 500)),
        prefix=290,
    ),
    Case(4, 2, 32, 64, (Row(1, 700), Row(3, 650), Row(1, 400), Row(9, 1000)), prefix=384),
    # The largest head dimension in use, with groups that no vector divides.
    Case(5, 1, 256, 16, random_rows(6, 6, 300)),
    Case(14, 2, 256, 1, (Row(1, 280), Row(60, 260), Row(1, 9)), prefix=256),
]
LATENT = [
    Case(16, 1, 576, 16, (*random_rows(9, 5, 400), Row(1, 700)), latent_rank=512),
    Case(128, 1, 80, 1, (*random_rows(10, 5, 200), Row(1, 290)), latent_rank=64),
    Case(20, 1, 48, 4, (Row(1, 700), Row(1, 650), Row(9, 1000)), prefix=384, latent_rank=32),
    Case(4, 1, 48, 4, random_rows(11, 9, 300), latent_rank=32),
]
CASES += LATENT


def bound(case: Case, dtype: torch.dtype) -> float:
    """bf16: the output's own rounding (2^-9) and, with AVX512_BF16, that of the probabilities."""
    exact = 2e-6 if case.head_dim <= 256 else 4e-6
    return exact if dtype == FP32 else 6e-3


@all_levels
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_matches_reference(case: Case, levels: list[str]):
    for dtype, kv_dtype in ((FP32, FP32), (BF16, BF16), (FP32, BF16), (BF16, FP32)):
        problem = make_problem(case, dtype, kv_dtype)
        reference = problem.reference()
        for level in levels:
            assert relative_error(problem.run_on_cpu(level), reference) < bound(case, dtype), (
                f"{level}, {dtype} with {kv_dtype} in the cache"
            )


@pytest.mark.cases(13)
@all_levels
@pytest.mark.parametrize("name", list(VARIANTS)[1:])
@pytest.mark.parametrize("case", [CASES[1], *CASES[8:]], ids=str)
def test_windows_and_soft_caps_match_reference(case: Case, name: str, levels: list[str]):
    for dtype in (FP32, BF16):
        problem = make_problem(case, dtype, variant=name)
        reference = problem.reference()
        for level in levels:
            error = relative_error(problem.run_on_cpu(level), reference)
            assert error < bound(case, dtype), f"{level}, {dtype}"


@each_level
def test_blocks_before_a_window_are_not_read(level: str):
    """Neither by a decode row that is cut into many pieces, nor by rows with a common prefix, nor
    by a chunk."""
    rows = (Row(1, 3000), Row(1, 900), Row(2, 910), Row(200, 1500))
    problem = make_problem(Case(8, 2, 64, 16, rows, prefix=640), FP32, variant="window100")
    expected = problem.run_on_cpu(level)
    batch = problem.batch
    for row, kv_len in enumerate(batch.kv_lens_host.tolist()):
        first = kv_len - int(np.diff(batch.cu_q_host)[row]) - 99
        unseen = batch.page_table[batch.slots[row], : first // 128 * 8].long()
        problem.k_cache[unseen] = problem.v_cache[unseen] = torch.nan
    assert torch.equal(problem.run_on_cpu(level), expected)


@pytest.mark.cases(24)
@each_level
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize(
    ("prefix", "name"),
    [
        (0, "plain"),
        (300, "plain"),
        (0, "both"),
        (300, "window100"),
        (300, "softcap"),
        (300, "sinks"),
    ],
)
@pytest.mark.parametrize("heads", [(9, 3), (20, 1)], ids=str)
def test_a_row_alone_equals_the_row_in_a_batch(
    prefix: int, name: str, heads: tuple[int, int], dtype: torch.dtype, level: str
):
    rows = (*random_rows(7, 16, 500), Row(1, 1300), Row(1, 310), Row(300, 700))
    rank = 48 if heads[1] == 1 else 0
    problem = make_problem(Case(*heads, 64, 1, rows, prefix, rank), dtype, variant=name)
    together = problem.run_on_cpu(level)
    for row in range(len(rows)):
        begin, end = problem.batch.cu_q_host[row], problem.batch.cu_q_host[row + 1]
        assert torch.equal(problem.only(row).run_on_cpu(level), together[begin:end])


@each_level
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("name", ["plain", "softcap", "window100", "all"])
@pytest.mark.parametrize("heads", [(6, 2), (16, 1)], ids=str)
def test_chunks_equal_the_whole_prompt(
    name: str, heads: tuple[int, int], dtype: torch.dtype, level: str
):
    """Token by token, in chunks or at once: the same bits."""
    rank = 48 if heads[1] == 1 else 0
    case = Case(*heads, 64, 16, (Row(400, 400),), latent_rank=rank)
    whole = make_problem(case, dtype, variant=name)
    expected = whole.run_on_cpu(level)
    for size in (1, 15, 128, 399):
        for begin in range(0, 400, size if size > 1 else 37):
            end = min(begin + size, 400)
            batch = make_batch(
                np.array([end - begin]),
                np.array([end], np.int32),
                whole.batch.slots,
                whole.batch.page_table,
            )
            chunk = Problem(
                whole.shape, whole.q[begin:end], whole.k_cache, whole.v_cache, batch, whole.variant
            )
            assert torch.equal(chunk.run_on_cpu(level), expected[begin:end])


@each_level
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_nan_is_not_hidden(dtype: torch.dtype, level: str):
    """A query with NaN gives NaN, so that the sampler sees it; its neighbours do not."""
    problem = make_problem(Case(4, 2, 32, 16, (Row(2, 200), Row(1, 200))), dtype)
    problem.q[1, 0, 3] = torch.nan
    result = problem.run_on_cpu(level)
    assert result[1, 0].isnan().all()
    assert result[0].isfinite().all()
    assert result[2].isfinite().all()


@each_level
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_extreme_sinks(dtype: torch.dtype, level: str):
    """A sink far below the scores changes no bit, one far above them leaves zeros, and a NaN stays
    in its head."""
    problem = make_problem(Case(6, 2, 64, 16, (Row(1, 200), Row(150, 300))), dtype)
    plain = problem.run_on_cpu(level)
    sinks = torch.full((6,), -1e4)
    sinks[2:4] = torch.tensor([1e4, torch.nan])
    problem.variant = replace(problem.variant, sinks=sinks)
    result = problem.run_on_cpu(level)
    for head in (0, 1, 4, 5):
        assert torch.equal(result[:, head], plain[:, head])
    assert result[:, 2].abs().max() < 1e-30
    assert result[:, 3].isnan().all()


@all_levels
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_sinks_on_a_pool_in_fp8(kv_dtype: torch.dtype, levels: list[str]):
    for dtype in (FP32, BF16):
        problem = make_problem(CASES[1], dtype, kv_dtype, variant="all")
        for level in levels:
            error = relative_error(problem.run_on_cpu(level), problem.reference())
            assert error < (2e-6 if dtype == FP32 else 6e-3), f"{level}, {dtype}"


@pytest.fixture
def threads():
    """Sets torch's number of threads; restored afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("name", ["plain", "both"])
def test_number_of_threads_changes_nothing(name: str, dtype: torch.dtype, threads):
    problem = make_problem(
        Case(9, 3, 64, 4, (*random_rows(8, 9, 600), Row(1, 1500), Row(1, 500)), prefix=256),
        dtype,
        variant=name,
    )
    results = []
    for count in (1, 2, 3):
        threads(count)
        results.append(problem.run_on_cpu())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
