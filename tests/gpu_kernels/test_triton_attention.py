"""The Triton attention, interpreted, against its definition: every kind of row, layer and pool, and
the same bits for a row alone, in a batch, with padding, and in turns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from setpoint.engine.attention.attention_backend import AttentionShape
from setpoint.engine.attention.triton_attention import TritonAttention, create, row_classes
from setpoint.engine.kernels.ops import KernelsUnavailable
from setpoint_testing import interpreted_triton as interpreted_triton
from setpoint_testing.attention_problems import (
    Case,
    Problem,
    Row,
    make_batch,
    make_problem,
    make_shape,
    relative_error,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TOLERANCE = {FP32: 2e-6, FP16: 8e-4, BF16: 6e-3}

HEADS = {
    "llama": (8, 2, 128, 0),
    "smollm2": (6, 2, 64, 0),
    "gpt-oss": (16, 2, 64, 0),
    "head80": (4, 2, 80, 0),
    "head96": (2, 2, 96, 0),
    "many": (20, 1, 32, 0),
    "latent": (16, 1, 80, 64),
    "latent48": (4, 1, 48, 16),
}
"""Query heads, key/value heads, head dimension, latent rank: the groups of models on at most two
key/value heads, because more of them are only more programs."""
ROWS = {
    "decode": (Row(1, 1), Row(1, 129), Row(1, 400)),
    "mixed": (Row(1, 300), Row(3, 3), Row(2, 400), Row(1, 2), Row(20, 50)),
    "chunk": (Row(70, 120),),
}
"""Decode rows of one and more pieces, a mix with a few tokens on a long prefix, and several blocks of
tokens."""
PAGES = (1, 16, 32, 64)
VARIANTS = ("plain", "window100", "softcap", "sinks", "all", "window1")
TABLE = [
    (heads, rows, PAGES[i % 4], variant)
    for i, (heads, rows, variant) in enumerate(
        (heads, rows, variant) for variant in VARIANTS for rows in ROWS for heads in HEADS
    )
]


def backend(shape: AttentionShape, room: int = 1 << 12) -> TritonAttention:
    """The backend with small and few pieces and room for this many units of scratch memory, so that
    short rows show what long ones do."""
    classes = tuple(
        replace(each, piece=128, programs=8 * each.head_programs) for each in row_classes(shape, 0)
    )
    return TritonAttention(shape, classes, 4 * classes[0].unit_numbers * room)


def problem(
    heads: str, rows: str, page: int, variant: str, dtype: torch.dtype, kv: torch.dtype | None
) -> Problem:
    *sizes, rank = HEADS[heads]
    return make_problem(Case(*sizes, page, ROWS[rows], 0, rank), dtype, kv, variant)


@pytest.mark.cases(7)
@pytest.mark.parametrize(("heads", "rows", "page", "variant"), TABLE)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_attention_matches_reference(
    heads: str, rows: str, page: int, variant: str, dtype: torch.dtype
):
    given = problem(heads, rows, page, variant, dtype, None)
    assert relative_error(given.run(backend(given.shape)), given.reference()) < TOLERANCE[dtype]


@pytest.mark.cases(2)
@pytest.mark.parametrize("heads", ["smollm2", "latent"])
@pytest.mark.parametrize("rows", ["decode", "mixed"])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [(BF16, E4M3), (FP16, E5M2), (BF16, E5M2), (FP32, BF16)], ids=str
)
def test_a_cache_in_another_type_has_scales(
    heads: str, rows: str, dtype: torch.dtype, kv_dtype: torch.dtype
):
    given = problem(heads, rows, 16, "softcap", dtype, kv_dtype)
    given.variant = replace(given.variant, k_scale=0.75, v_scale=2.5)
    assert relative_error(given.run(backend(given.shape)), given.reference()) < TOLERANCE[dtype]


def padded(given: Problem, rows: int, tokens: int) -> Problem:
    """Followed by rows without positions, with one token each, and by tokens of no row."""
    batch = given.batch
    counts = np.append(np.diff(batch.cu_q_host), [1] * rows)
    lens = np.append(batch.kv_lens_host, [0] * rows).astype(np.int32)
    slots = torch.cat((batch.slots, torch.zeros(rows, dtype=torch.int32)))
    q = torch.cat((given.q, torch.full((rows + tokens, *given.q.shape[1:]), 3.0).to(given.q)))
    batch = make_batch(counts, lens, slots, batch.page_table)
    return replace(given, q=q, batch=replace(batch, positions=torch.zeros(len(q))))


@pytest.mark.cases(2)
@pytest.mark.parametrize("variant", ["plain", "all"])
@pytest.mark.parametrize("heads", ["smollm2", "many", "latent"])
@pytest.mark.parametrize("rows", ["decode", "mixed"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_a_row_has_the_same_bits_alone_and_padded(
    heads: str, rows: str, variant: str, dtype: torch.dtype
):
    given = problem(heads, rows, 16, variant, dtype, None)
    together = given.run(backend(given.shape))
    for row in range(len(ROWS[rows])):
        begin, end = given.batch.cu_q_host[row : row + 2]
        assert torch.equal(given.only(row).run(backend(given.shape)), together[begin:end])
    result = padded(given, 3, 0 if rows == "decode" else 5).run(backend(given.shape))
    assert torch.equal(result[: len(together)], together)
    assert (result[len(together) :] == 0).all()


@pytest.mark.cases(2)
@pytest.mark.parametrize("variant", ["plain", "window100", "all"])
@pytest.mark.parametrize("heads", ["smollm2", "many", "latent"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_a_token_has_the_same_bits_in_every_chunk(
    heads: str, variant: str, dtype: torch.dtype
) -> None:
    """If that is asked for: one token or several, and beside rows of one token and without any."""
    *sizes, rank = HEADS[heads]
    rows = (Row(70, 400), Row(1, 300), Row(2, 2))
    given = make_problem(Case(*sizes, 16, rows, 0, rank), dtype, variant=variant)
    given.shape = replace(given.shape, invariant=True)
    together = given.run(backend(given.shape))
    assert relative_error(together, given.reference()) < TOLERANCE[dtype]
    long, batch = given.only(0), given.batch
    for begin, end in ((0, 1), (1, 38), (38, 69), (69, 70)):
        lens = np.array([400 - 70 + end], np.int32)
        chunk = make_batch(np.array([end - begin]), lens, long.batch.slots, batch.page_table)
        found = replace(long, q=long.q[begin:end], batch=chunk).run(backend(given.shape))
        assert torch.equal(found, together[begin:end]), begin
    for row in (1, 2):
        begin, end = batch.cu_q_host[row : row + 2]
        assert torch.equal(given.only(row).run(backend(given.shape)), together[begin:end])
    result = padded(given, 3, 5).run(backend(given.shape))
    assert torch.equal(result[: len(together)], together)
    assert (result[len(together) :] == 0).all()


def test_rows_take_turns_with_the_same_bits():
    """The scratch memory has no room for the pieces of all rows."""
    rows = (Row(1, 300), Row(1, 400), Row(3, 3), Row(2, 400), Row(1, 200), Row(2, 300))
    given = make_problem(Case(2, 1, 16, 16, rows), FP32, variant="all")
    given.variant = replace(given.variant, window=350)
    expected = given.run(backend(given.shape))
    assert torch.equal(given.run(backend(given.shape, room=4)), expected)


def test_a_step_is_planned_for_all_windows_of_its_group():
    """Windows that a backend has seen are planned by ``prepare`` alone, and no plan survives it."""
    first, second = (
        make_problem(Case(2, 1, 16, 16, ROWS[rows]), FP32) for rows in ("mixed", "decode")
    )
    variants = [replace(first.variant, window=window) for window in (None, 30)]
    used = backend(first.shape)
    for given in (first, second):
        for variant in variants:
            given.variant = variant
            assert torch.equal(given.run(used), given.run(backend(first.shape)))


def test_pages_before_a_window_are_not_read():
    rows = (Row(1, 400), Row(2, 410), Row(20, 300))
    given = make_problem(Case(4, 2, 64, 16, rows), FP32, variant="window100")
    expected = given.run(backend(given.shape))
    batch = given.batch
    for row, (count, kv_len) in enumerate((row.count, row.kv_len) for row in rows):
        batch.page_table[batch.slots[row], : (kv_len - count - 99) // 16] = -7
    assert torch.equal(given.run(backend(given.shape)), expected)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
def test_nan_is_not_hidden():
    """A query with NaN gives NaN, so that the sampler sees it; its neighbours do not."""
    given = make_problem(Case(4, 2, 32, 16, (Row(2, 200), Row(1, 200))), FP32)
    given.q[1, 0, 3] = torch.nan
    result = given.run(backend(given.shape))
    assert result[1, 0].isnan().all()
    assert result[0].isfinite().all()
    assert result[1:, 1:].isfinite().all()


def test_extreme_sinks():
    """A sink far below the scores changes no bit, one far above them leaves zeros, and a NaN stays
    in its head."""
    given = make_problem(Case(6, 2, 64, 16, (Row(1, 200), Row(30, 50))), FP32)
    plain = given.run(backend(given.shape))
    sinks = torch.full((6,), -1e4)
    sinks[2:4] = torch.tensor([1e4, torch.nan])
    given.variant = replace(given.variant, sinks=sinks)
    result = given.run(backend(given.shape))
    for head in (0, 1, 4, 5):
        assert torch.equal(result[:, head], plain[:, head])
    assert result[:, 2].abs().max() < 1e-30
    assert result[:, 3].isnan().all()


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "head_dim", "reason"),
    [
        (torch.float64, torch.float64, 64, "bf16, fp16 and fp32"),
        (BF16, FP32, 64, "float32 in the cache"),
        (BF16, BF16, 640, "head dimension 640"),
    ],
)
def test_what_it_cannot_do_is_refused(
    dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, reason: str
):
    with pytest.raises(KernelsUnavailable, match=reason):
        create(make_shape(4, 2, head_dim, 16, dtype, kv_dtype))
