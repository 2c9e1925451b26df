"""Kernels in Triton on a GPU against the reference on the CPU, each many times with the same bits."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from setpoint.engine.kernels.ops import Routing
from setpoint.engine.kernels.ref import RefOps
from setpoint.engine.quant import fp8, w8a8_int8
from setpoint_testing.attention_problems import (
    VARIANTS,
    Case,
    Problem,
    Row,
    make_problem,
    random_rows,
    relative_error,
)
from setpoint_testing.gpu_device import DEVICE, GPU, REHEARSED
from setpoint_testing.operation_cases import BF16, FP32, close, latent_arguments, with_ties_and_nan

pytestmark = GPU

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
REPEATS = 2 if REHEARSED else 20
TOKENS, VOCABULARY = (7, 9000) if REHEARSED else (300, 152_064)
TOLERANCE = {FP32: 2e-6, BF16: 6e-3}
HEADS = {
    "llama-8b": (32, 8, 128, 0),
    "qwen3-0.6b": (16, 8, 128, 0),
    "smollm2": (9, 3, 64, 0),
    "gpt-oss": (64, 8, 64, 0),
    "gemma2": (16, 8, 256, 0),
    "deepseek-v2-lite": (16, 1, 576, 512),
}
"""Query heads, key/value heads, size of a head, latent rank."""
ROWS = {
    "decode": (Row(1, 1), Row(1, 129), Row(1, 1100), Row(1, 5000)),
    "mixed": random_rows(3, 12, 1000),
    "chunk": (Row(700, 1200), Row(33, 33)),
}
SHORT = {
    "decode": (Row(1, 1), Row(1, 129)),
    "mixed": (Row(1, 40), Row(3, 9), Row(20, 25)),
    "chunk": (Row(20, 40),),
}
Outcome = torch.Tensor | tuple[torch.Tensor, ...]


def all_equal(results: list[Outcome]) -> bool:
    """Whether all results have the same bits."""
    sets = [each if isinstance(each, tuple) else (each,) for each in results]
    return all(
        torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
        for each in sets[1:]
        for one, other in zip(sets[0], each, strict=True)
    )


def moved(given: Problem) -> Problem:
    """The problem on the device. V of a latent attention stays a part of K."""
    batch = given.batch
    tensors = {
        name: getattr(batch, name).to(DEVICE)
        for name in ("positions", "kv_index", "cu_q", "kv_lens", "slots", "page_table")
    }
    keys, variant = given.k_cache.to(DEVICE), given.variant
    shared = given.v_cache.data_ptr() == given.k_cache.data_ptr()
    values = keys[..., : given.v_cache.shape[-1]] if shared else given.v_cache.to(DEVICE)
    sinks = None if variant.sinks is None else variant.sinks.to(DEVICE)
    return Problem(
        replace(given.shape, device=DEVICE),
        given.q.to(DEVICE),
        keys,
        values,
        replace(batch, **tensors),
        replace(variant, sinks=sinks),
    )


@pytest.mark.parametrize("kind", [BF16, E4M3, E5M2, FP32], ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("heads", HEADS)
def test_attention(
    heads: str,
    rows: str,
    kind: torch.dtype,
    record_property: Callable[[str, object], None],
) -> None:
    from setpoint.engine.attention.triton_attention import create

    number, kv_heads, size, rank = HEADS[heads]
    if REHEARSED:
        number, kv_heads, size, rank = number // kv_heads, 1, min(size, 64), min(rank, 32)
    dtype = FP32 if kind == FP32 else BF16
    variants = sorted(VARIANTS)
    variant = variants[zlib.crc32(f"{heads}{rows}{kind}".encode()) % len(variants)]
    case = Case(number, kv_heads, size, 16, (SHORT if REHEARSED else ROWS)[rows], 0, rank)
    given = make_problem(case, dtype, kind, variant)
    there = moved(given)
    results = [there.run(create(there.shape)) for _ in range(REPEATS)]
    error = relative_error(results[0].cpu(), given.reference())
    record_property(f"error, {variant}", error)
    assert error < TOLERANCE[dtype]
    assert all_equal(list(results))


def norms(ops: Any, to: Any, dtype: torch.dtype) -> Outcome:
    x, residual, weight = (to(torch.randn(TOKENS, 1536).to(dtype)) for _ in range(3))
    normed, summed = ops.add_rms_norm(x.clone(), residual.clone(), weight[0], 1e-5)
    return ops.rms_norm(x, weight[0], 1e-5), normed, summed


def gates(ops: Any, to: Any, dtype: torch.dtype) -> Outcome:
    both = to(torch.randn(TOKENS, 2 * 1536).mul(4).to(dtype))
    clamped = ops.clamped_swiglu_mul(both, 1.702, 7.0)
    return ops.silu_mul(both), ops.gelu_tanh_mul(both), clamped


def lookups(ops: Any, to: Any, dtype: torch.dtype) -> Outcome:
    table, ids = to(torch.randn(500, 1536).to(dtype)), to(torch.randint(0, 500, (TOKENS,)).int())
    return ops.embedding(ids, table, 1.0), ops.embedding(ids, table, 7.3)


def choices(ops: Any, to: Any, dtype: torch.dtype) -> Outcome:
    logits = to(with_ties_and_nan(4096, dtype))
    words = to(torch.randint(-(1 << 31), 1 << 31, (3, 128)).int())
    best, top = ops.best_tokens(logits), ops.top_tokens(logits.nan_to_num(0.5, 99.0, -99.0), 20)
    ops.mask_tokens(logits, to(torch.tensor([11, 0, 7])), words)
    large = to(torch.randn(8, VOCABULARY).to(dtype))
    return (
        best,
        top,
        logits.nan_to_num(0.5, 99.0, -99.0),
        ops.best_tokens(large),
        ops.top_tokens(large, 5),
    )


def rotations(ops: Any, to: Any, dtype: torch.dtype) -> Outcome:
    merged = to(torch.randn(TOKENS, 12, 128).to(dtype))
    q, k, v = merged.clone().split([8, 2, 2], dim=1)
    angles, positions = torch.rand(1000, 64) * 6.3, to(torch.randint(0, 1000, (TOKENS,)))
    caches = [to(torch.zeros(41, 16, 2, 128, dtype=dtype)) for _ in range(2)]
    cos_sin = to(torch.cat((angles.cos(), angles.sin()), dim=-1))
    places = to(16 + torch.randperm(16 * 40)[:TOKENS])
    return (ops.rope_and_store(q, k, v, cos_sin, positions, *caches, places), *caches)


def latents(ops: Any, to: Any, dtype: torch.dtype) -> Outcome:
    given = [to(each) for each in latent_arguments(TOKENS, 64, 4, 512, dtype)]
    cache = to(torch.zeros(41, 16, 1, 576, dtype=dtype))
    places = to(16 + torch.randperm(16 * 40)[:TOKENS])
    return ops.rope_and_store_latent(*given, cache, places, interleaved=True), cache


def routes(ops: Any, to: Any, dtype: torch.dtype) -> Outcome:
    logits = to(torch.randn(TOKENS, 128).mul(3).to(dtype))
    ids, weights = ops.route(logits, Routing(8, normalise=True))
    load = to(torch.zeros(128, dtype=torch.int64))
    placed = ops.place_experts(ids, load, None)
    parts = to(torch.randn(TOKENS * 8, 256).to(dtype))
    return ids, weights, placed, load, ops.combine(parts, weights)


OPERATIONS = (norms, gates, lookups, choices, rotations, latents, routes)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: each.__name__)
def test_operations(operation: Callable[..., Outcome], dtype: torch.dtype) -> None:
    from setpoint.engine.kernels.triton.ops import create

    def results_of(ops: Any, to: Callable[[torch.Tensor], torch.Tensor]) -> Outcome:
        torch.manual_seed(7)
        return operation(ops, to, dtype)

    expected = results_of(RefOps(), lambda x: x.double() if x.is_floating_point() else x.clone())
    found = [results_of(create(BF16), lambda x: x.to(DEVICE)) for _ in range(REPEATS)]
    assert all_equal(found)
    for one, other in zip(found[0], expected, strict=True):
        if other.is_floating_point():
            assert close(one.cpu(), other, dtype), (one.cpu() - other).abs().max()
        else:
            assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize(("pairs", "height"), [((3, 2), 16), ((60, 4), 16), ((700, 4), 64)])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32], ids=str)
def test_products_with_experts(dtype: torch.dtype, pairs: tuple[int, int], height: int) -> None:
    from setpoint.engine.kernels.triton.grouped import multiply_pairs, tile_of

    torch.manual_seed(1)
    ids = torch.randint(0, 8, pairs, dtype=torch.int32)
    weights, x = torch.randn(8, 200, 320).to(dtype), torch.randn(pairs[0], 320).to(dtype)
    assert tile_of(ids.numel(), 8, dtype.itemsize).height == height
    there = [each.to(DEVICE) for each in (x, weights, ids)]
    found = [multiply_pairs(*there, dtype=dtype) for _ in range(REPEATS)]
    rows = x.double().repeat_interleave(pairs[1], 0)
    expected = torch.einsum("pk,pnk->pn", rows, weights.double()[ids.flatten().long()])
    error = (found[0].cpu().double() - expected).abs() / (expected.abs() + expected.abs().mean())
    assert error.max() <= {FP32: 2e-6, BF16: 2**-8, torch.float16: 2**-11}[dtype]
    assert all_equal(list(found))


@pytest.mark.parametrize("kind", [E4M3, torch.int8], ids=str)
@pytest.mark.parametrize("columns", [128, 576, 4096])
def test_rounded_activations_are_what_is_defined(columns: int, kind: torch.dtype) -> None:
    from setpoint.engine.kernels.triton.quantising import quantise_rows

    torch.manual_seed(columns)
    x = torch.randn(TOKENS, columns).to(BF16)
    x[1, 3], x[2], x[3] = 300.0, 0.0, x[3] * 1e-20
    run = w8a8_int8.block_size(columns) if kind == torch.int8 else 1
    found = [quantise_rows(x.to(DEVICE), kind, run=run) for _ in range(REPEATS)]
    if kind == torch.int8:
        codes, scales = w8a8_int8.quantize_rows(w8a8_int8.rotate(x.float()))
    else:
        codes, scales = fp8.quantize_rows(x, columns)
    assert torch.equal(found[0][0].cpu().view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(found[0][1].cpu().flatten(), scales.flatten())
    assert all_equal(list(found))


@pytest.mark.parametrize("rows", [1, 17, TOKENS])
def test_products_in_fp8(rows: int) -> None:
    """The one of torch, with scales of rows, and the one in Triton, with scales of 128 inputs."""
    from setpoint.engine.quant.rounded import GROUP, RoundedWeight

    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 512).to(BF16), torch.randn(256, 512)
    for group in (512, GROUP):
        codes, scales = fp8.quantize_rows(weight, group)
        packed = RoundedWeight(codes.to(DEVICE), scales.to(DEVICE), None)
        found = [packed(x.to(DEVICE)) for _ in range(REPEATS)]
        x_codes, x_scales = fp8.quantize_rows(x, group)
        expected = (
            x_codes.double().view(rows, -1, group) * x_scales.double().unsqueeze(2)
        ).flatten(1) @ (codes.double().view(256, -1, group) * scales.double().unsqueeze(2)).flatten(
            1
        ).t()
        error = (found[0].cpu().double() - expected).abs() / (
            expected.abs() + expected.abs().mean()
        )
        assert error.max() <= 2**-7
        assert all_equal(list(found))
