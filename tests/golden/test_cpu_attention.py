"""The C++ attention against its definition: every shape of batch, bit for bit where the order of
sums is the same."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from setpoint.engine.attention import cpu_attention as cpu_attention
from setpoint.engine.attention import torch_ref
from setpoint.engine.attention.attention_backend import (
    AttentionBatch,
    AttentionShape,
    AttentionVariant,
)
from setpoint_testing.attending import attend
from setpoint_testing.cpu_levels import all_levels, each_level

BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Row:
    count: int
    kv_len: int


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    rows: tuple[Row, ...]
    prefix: int = 0
    """Leading tokens (whole pages) that every longer row has in common with the others."""
    latent_rank: int = 0
    """If not 0, V is the first so many numbers of K."""

    def __str__(self) -> str:
        return f"h{self.heads}/{self.kv_heads}-d{self.head_dim}-p{self.page_size}-n{len(self.rows)}-s{self.prefix}-v{self.latent_rank}"


def random_rows(seed: int, num_rows: int, longest: int) -> tuple[Row, ...]:
    """A mix of decode rows, whole prompts and later chunks."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(num_rows):
        kv_len = int(np.exp(rng.uniform(0, np.log(longest))))
        count = (1, kv_len, int(rng.integers(1, kv_len + 1)))[rng.choice(3, p=(0.6, 0.2, 0.2))]
        rows.append(Row(count, kv_len))
    return tuple(rows)


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
VARIANTS: dict[str, tuple[float | None, int | None, bool]] = {
    "plain": (None, None, False),
    "softcap": (2.5, None, False),
    "window1": (None, 1, False),
    "window100": (None, 100, False),
    "window128": (None, 128, False),
    "both": (50.0, 257, False),
    "sinks": (None, None, True),
    "all": (50.0, 100, True),
}
"""Soft cap, window, and whether there are sinks, below and above the scores."""


@dataclass
class Problem:
    """Random activations and a pool in which every row's pages are scattered."""

    shape: AttentionShape
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    batch: AttentionBatch
    variant: AttentionVariant

    def only(self, row: int) -> Problem:
        begin, end = self.batch.cu_q_host[row], self.batch.cu_q_host[row + 1]
        pick = slice(row, row + 1)
        batch = make_batch(
            np.diff(self.batch.cu_q_host)[pick],
            self.batch.kv_lens_host[pick],
            self.batch.slots[pick].contiguous(),
            self.batch.page_table,
        )
        return Problem(
            self.shape, self.q[begin:end], self.k_cache, self.v_cache, batch, self.variant
        )

    def run(self, level: str | None = None) -> torch.Tensor:
        return attend(
            cpu_attention.create(self.shape, level=level),
            self.q,
            self.k_cache,
            self.v_cache,
            self.batch,
            self.variant,
        )

    def reference(self) -> torch.Tensor:
        backend = torch_ref.create(replace(self.shape, dtype=torch.float64))
        return attend(
            backend,
            self.q.double(),
            self.k_cache.double(),
            self.v_cache.double(),
            self.batch,
            self.variant,
        )


def make_shape(
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    latent_rank: int = 0,
) -> AttentionShape:
    cpu = torch.device("cpu")
    return AttentionShape(
        heads, kv_heads, head_dim, page_size, dtype, kv_dtype or dtype, cpu, latent_rank
    )


def make_batch(
    counts: np.ndarray, kv_lens: np.ndarray, slots: torch.Tensor, page_table: torch.Tensor
) -> AttentionBatch:
    cu_q = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    unused = torch.zeros(int(cu_q[-1]), dtype=torch.int64)
    return AttentionBatch(
        unused,
        unused,
        torch.from_numpy(cu_q),
        cu_q,
        torch.from_numpy(kv_lens),
        kv_lens,
        slots,
        page_table,
    )


def make_problem(
    case: Case, dtype: torch.dtype, kv_dtype: torch.dtype | None = None, variant: str = "plain"
) -> Problem:
    torch.manual_seed(0)
    counts = np.array([row.count for row in case.rows], np.int32)
    kv_lens = np.array([row.kv_len for row in case.rows], np.int32)
    pages = -(-kv_lens // case.page_size)
    order = torch.randperm(int(pages.sum())) + 1
    table = torch.full((len(case.rows) + 2, int(pages.max()) + 1), 2**30, dtype=torch.int32)
    slots = torch.randperm(len(case.rows) + 2)[: len(case.rows)].int()
    for row, (begin, length) in enumerate(zip(np.cumsum(pages) - pages, pages, strict=True)):
        table[slots[row], :length] = order[begin : begin + length].int()
        shared = case.prefix // case.page_size
        if kv_lens[row] > case.prefix:
            table[slots[row], :shared] = order[:shared].int()
    cache_shape = (int(pages.sum()) + 1, case.page_size, case.kv_heads, case.head_dim)
    k_cache, v_cache = (torch.randn(cache_shape).to(kv_dtype or dtype) for _ in range(2))
    if case.latent_rank:
        v_cache = k_cache[..., : case.latent_rank]
    k_cache[0] = v_cache[0] = torch.nan  # the dummy page must not be read
    # q is a strided view into the merged projection.
    merged = torch.randn(int(counts.sum()), case.heads + 2 * case.kv_heads, case.head_dim).to(dtype)
    shape = make_shape(
        case.heads,
        case.kv_heads,
        case.head_dim,
        case.page_size,
        dtype,
        kv_dtype,
        case.latent_rank,
    )
    batch = make_batch(counts, kv_lens, slots, table)
    softcap, window, has_sinks = VARIANTS[variant]
    sinks = torch.linspace(-5, 5, case.heads) if has_sinks else None
    return Problem(
        shape,
        merged[:, : case.heads],
        k_cache,
        v_cache,
        batch,
        AttentionVariant(case.head_dim**-0.5, softcap, window, sinks),
    )


def relative_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest error per head vector, relative to the reference's norm."""
    return ((result.double() - reference).norm(dim=-1) / reference.norm(dim=-1)).max().item()


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
            assert relative_error(problem.run(level), reference) < bound(case, dtype), (
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
            error = relative_error(problem.run(level), reference)
            assert error < bound(case, dtype), f"{level}, {dtype}"


@each_level
def test_blocks_before_a_window_are_not_read(level: str):
    """Neither by a decode row that is cut into many pieces, nor by rows with a common prefix, nor
    by a chunk."""
    rows = (Row(1, 3000), Row(1, 900), Row(2, 910), Row(200, 1500))
    problem = make_problem(Case(8, 2, 64, 16, rows, prefix=640), FP32, variant="window100")
    expected = problem.run(level)
    batch = problem.batch
    for row, kv_len in enumerate(batch.kv_lens_host.tolist()):
        first = kv_len - int(np.diff(batch.cu_q_host)[row]) - 99
        unseen = batch.page_table[batch.slots[row], : first // 128 * 8].long()
        problem.k_cache[unseen] = problem.v_cache[unseen] = torch.nan
    assert torch.equal(problem.run(level), expected)


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
    together = problem.run(level)
    for row in range(len(rows)):
        begin, end = problem.batch.cu_q_host[row], problem.batch.cu_q_host[row + 1]
        assert torch.equal(problem.only(row).run(level), together[begin:end])


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
    expected = whole.run(level)
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
            assert torch.equal(chunk.run(level), expected[begin:end])


@each_level
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_nan_is_not_hidden(dtype: torch.dtype, level: str):
    """A query with NaN gives NaN, so that the sampler sees it; its neighbours do not."""
    problem = make_problem(Case(4, 2, 32, 16, (Row(2, 200), Row(1, 200))), dtype)
    problem.q[1, 0, 3] = torch.nan
    result = problem.run(level)
    assert result[1, 0].isnan().all()
    assert result[0].isfinite().all()
    assert result[2].isfinite().all()


@each_level
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_extreme_sinks(dtype: torch.dtype, level: str):
    """A sink far below the scores changes no bit, one far above them leaves zeros, and a NaN stays
    in its head."""
    problem = make_problem(Case(6, 2, 64, 16, (Row(1, 200), Row(150, 300))), dtype)
    plain = problem.run(level)
    sinks = torch.full((6,), -1e4)
    sinks[2:4] = torch.tensor([1e4, torch.nan])
    problem.variant = replace(problem.variant, sinks=sinks)
    result = problem.run(level)
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
            error = relative_error(problem.run(level), problem.reference())
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
        results.append(problem.run())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
