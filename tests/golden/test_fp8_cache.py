"""A KV cache in 8 bits: which value every number is stored as, and attention that gives the bits of
a wider cache with the same values."""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_captured_steps import make_runner, of_architecture, said, same
from test_cpu_attention import (
    CASES,
    VARIANTS,
    Case,
    Problem,
    Row,
    bound,
    make_problem,
    random_rows,
)

from setpoint.engine.kernels.cpu import build, library
from setpoint.engine.kernels.cpu import ops as cpu_ops
from setpoint.engine.kernels.ref import RefOps
from setpoint_testing.against_transformers import write_tiny
from setpoint_testing.attention_problems import relative_error
from setpoint_testing.cpu_levels import LEVELS, all_levels, each_level
from setpoint_testing.fp8_numbers import (
    KINDS,
    LARGEST,
    SCALES,
    hard_numbers,
    nearest,
    quotients,
    stored,
)
from setpoint_testing.operation_cases import BF16, FP32
from setpoint_testing.tiny_models import write_tiny_llama


@all_levels
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_every_number_is_stored_as_the_nearest(
    dtype: torch.dtype, kind: torch.dtype, levels: list[str]
) -> None:
    values = hard_numbers().to(dtype)
    expected, nan = nearest(values, kind), values.isnan()
    for ops in (RefOps(), *(cpu_ops.create(dtype, level=level) for level in levels)):
        codes = stored(ops, values, kind)
        assert torch.equal(codes[~nan], expected[~nan])
        assert codes[nan].view(kind).isnan().all()


@all_levels
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_numbers_are_divided_by_their_scale(
    dtype: torch.dtype, kind: torch.dtype, levels: list[str]
) -> None:
    values = hard_numbers().to(dtype)
    for scale in SCALES:
        quotient = quotients(values, scale)
        expected, nan = nearest(quotient, kind), quotient.isnan()
        for ops in (RefOps(), *(cpu_ops.create(dtype, level=level) for level in levels)):
            codes = stored(ops, values, kind, scale)
            assert torch.equal(codes[~nan], expected[~nan]), scale
            assert codes[nan].view(kind).isnan().all()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@each_level
def test_scales_multiply_what_is_read(level: str, kind: torch.dtype) -> None:
    """Powers of two change no rounding, neither of scores nor of results."""
    for number, case in enumerate(CASES):
        variant = list(VARIANTS)[number % len(VARIANTS)]
        for dtype in (FP32, BF16):
            problem = make_problem(case, dtype, kind, variant)
            plain, scale = problem.run_on_cpu(level), problem.variant.scale
            problem.variant = replace(problem.variant, scale=scale / 8.0, k_scale=8.0, v_scale=0.25)
            assert torch.equal(problem.run_on_cpu(level), plain * 0.25), (case, dtype)
    problem.variant = replace(problem.variant, k_scale=0.37, v_scale=1.7)
    error = relative_error(problem.run_on_cpu(level), problem.reference())
    assert error < bound(case, dtype)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@each_level
def test_every_code_is_read_as_its_value(level: str, kind: torch.dtype) -> None:
    """A token that sees one key gets that key's values."""
    codes = torch.arange(LARGEST[kind] + 1, dtype=torch.uint8)
    values = torch.cat((codes, codes | 0x80)).view(kind)
    values = values.view(torch.uint8)[torch.arange(256) % len(values)].view(kind)
    for dtype in (FP32, BF16):
        problem = make_problem(Case(3, 1, 64, 4, (Row(1, 1),) * 4), dtype, kind)
        pages = problem.batch.page_table[problem.batch.slots, 0].long()
        problem.v_cache[pages, 0, 0] = values.view(4, 64)
        expected = values.view(4, 1, 64).to(dtype).expand(-1, 3, -1)
        assert torch.equal(problem.run_on_cpu(level), expected)


def widened(problem: Problem, dtype: torch.dtype) -> Problem:
    """The same problem with a cache of this type."""
    shape, k_cache = problem.shape, problem.k_cache.to(dtype)
    rank = shape.v_head_dim
    return Problem(
        replace(shape, kv_dtype=dtype),
        problem.q,
        k_cache,
        k_cache[..., :rank] if rank else problem.v_cache.to(dtype),
        problem.batch,
        problem.variant,
    )


@pytest.mark.parametrize("kind", KINDS, ids=str)
@each_level
def test_bits_are_those_of_a_wider_cache(level: str, kind: torch.dtype) -> None:
    for number, case in enumerate(CASES):
        variant = list(VARIANTS)[number % len(VARIANTS)]
        for dtype in (FP32, BF16):
            problem = make_problem(case, dtype, kind, variant)
            assert torch.equal(
                problem.run_on_cpu(level), widened(problem, BF16).run_on_cpu(level)
            ), (case, dtype)


@pytest.mark.full
@pytest.mark.skipif("avx512_bf16" not in LEVELS, reason="the other levels have one way only")
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_without_the_permutations_of_bytes(
    kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU without AVX512_VBMI reads codes in another way."""
    levels = build.LEVELS[platform.machine()]
    monkeypatch.setitem(levels, "avx512_bf16", replace(levels["avx512_bf16"], more=()))
    library._load.cache_clear()
    try:
        for case in CASES:
            problem = make_problem(case, BF16, kind)
            expected = widened(problem, BF16).run_on_cpu("avx512_bf16")
            assert torch.equal(problem.run_on_cpu("avx512_bf16"), expected), case
    finally:
        library._load.cache_clear()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@each_level
def test_any_values(level: str, kind: torch.dtype) -> None:
    """The values have any size and sign; the smallest are among them."""
    rows = (*random_rows(3, 8, 300), Row(1, 400), Row(90, 200))
    for dtype in (FP32, BF16):
        problem = make_problem(Case(6, 2, 80, 16, rows), dtype, kind)
        for cache in (problem.k_cache, problem.v_cache):
            codes = torch.randint(0, LARGEST[kind] + 1, cache.shape, dtype=torch.uint8)
            signs = torch.randint(0, 2, cache.shape, dtype=torch.uint8) << 7
            cache.view(torch.uint8)[1:] = (codes | signs)[1:]
        result = problem.run_on_cpu(level)
        assert torch.equal(result, widened(problem, BF16).run_on_cpu(level))
        assert result.isfinite().all()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@each_level
@pytest.mark.parametrize("where", ["k_cache", "v_cache"])
def test_nan_is_not_hidden(where: str, level: str, kind: torch.dtype) -> None:
    for dtype in (FP32, BF16):
        problem = make_problem(Case(4, 2, 32, 16, (Row(2, 200), Row(1, 200))), dtype, kind)
        page = problem.batch.page_table[problem.batch.slots[1], 3]
        getattr(problem, where)[page, 5, 1, 7] = torch.nan
        result = problem.run_on_cpu(level)
        assert result[2, 2:].isnan().any(dim=-1).all()
        assert result[2, :2].isfinite().all()
        assert result[:2].isfinite().all()


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma2ForCausalLM"])
def test_replayed_steps_and_chunks(architecture: str, kv_dtype: str, tmp_path: Path) -> None:
    """The same logits whether steps are replayed, and however prompts are cut."""
    folder = write_tiny(tmp_path, of_architecture(architecture))
    replayed, eager = (
        make_runner(folder, kv_dtype=kv_dtype, capture=capture) for capture in (True, False)
    )
    first, second = said(replayed), said(eager)
    assert first[0] == second[0]
    assert same(first[1], second[1])
    assert said(eager, chunk=7)[0] == second[0]
    assert replayed.pool.num_bytes == make_runner(folder).pool.num_bytes / 2


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_reference_agrees(dtype: str, kv_dtype: str, tmp_path: Path) -> None:
    """The C++ kernels and plain torch store and read the same codes."""
    folder = write_tiny(tmp_path, of_architecture("LlamaForCausalLM"))
    logits = [
        said(make_runner(folder, dtype, kv_dtype=kv_dtype, capture=False, **more))[1][0]
        for more in ({}, {"attention_backend": "torch_ref"})
    ]
    error = (logits[0] - logits[1]).norm() / logits[1].norm()
    assert error < 0.02


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_code_of_another_library(kv_dtype: str, tmp_path: Path) -> None:
    """The trial at start allows for the rounding."""
    runner = make_runner(
        write_tiny_llama(tmp_path), kv_dtype=kv_dtype, model_impl="transformers", capture=False
    )
    assert runner.pool.memory.dtype.itemsize == 1
