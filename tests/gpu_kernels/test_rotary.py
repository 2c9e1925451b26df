"""Rotary embedding and stores in Triton, interpreted, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from setpoint.engine.kernels.ref import RefOps
from setpoint_testing import interpreted_triton as interpreted_triton
from setpoint_testing.fp8_numbers import (
    E4M3,
    E5M2,
    KINDS,
    SCALES,
    hard_numbers,
    nearest,
    quotients,
    stored,
)
from setpoint_testing.operation_cases import (
    BF16,
    FP32,
    LATENTS,
    ROTARIES,
    close,
    latent_arguments,
)

# isort: split
from setpoint.engine.kernels.triton.ops import create

REF, OPS = RefOps(), create(BF16)
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


def angles_of(rotary: int) -> torch.Tensor:
    angles = torch.rand(1000, rotary // 2) * 6.3
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class Rotation:
    """A step's queries, keys and values, and caches that hold NaN wherever nothing is stored."""

    def __init__(self, sizes: tuple[int, ...], dtype: torch.dtype, kind: torch.dtype) -> None:
        heads, kv_heads, size, rotary, tokens = sizes
        torch.manual_seed(size)
        self.split = (heads, kv_heads, kv_heads)
        self.merged = torch.randn(tokens, heads + 2 * kv_heads, size).to(dtype)
        self.cos_sin = angles_of(rotary)
        self.positions = torch.randint(0, 1000, (tokens,))
        self.kv_index = 16 + torch.randperm(16 * 40)[:tokens]
        self.scales = (0.4, 1.3) if kind in KINDS else ()
        self.empty = torch.full((41, 16, kv_heads, size), torch.nan).to(kind)

    def run(self, ops: Any, tokens: slice = slice(None)) -> tuple[torch.Tensor, ...]:
        q, k, v = self.merged[tokens].clone().split(self.split, dim=1)
        caches = self.empty.clone(), self.empty.clone()
        q = ops.rope_and_store(
            *(q, k, v, self.cos_sin, self.positions[tokens]),
            *(*caches, self.kv_index[tokens], *self.scales),
        )
        return q, *caches


@pytest.mark.cases(6)
@pytest.mark.parametrize("sizes", ROTARIES, ids=str)
@pytest.mark.parametrize("kind", [BF16, FP32, E4M3, E5M2], ids=str)
@DTYPES
def test_rope_and_store_matches_the_reference(
    dtype: torch.dtype, kind: torch.dtype, sizes: tuple[int, ...]
) -> None:
    problem = Rotation(sizes, dtype, kind)
    q, keys, values = problem.run(OPS)
    expected_q, expected_keys, expected_values = problem.run(REF)
    assert close(q, expected_q, dtype)
    assert torch.equal(q[..., sizes[3] :], problem.merged[:, : sizes[0], sizes[3] :])
    untouched = expected_values.float().isnan()
    assert torch.equal(keys.float().isnan(), untouched)
    assert torch.equal(values.float().isnan(), untouched)
    # Of two values that are both nearest up to one rounding, fp8 may have either.
    step = 2 ** -(2 if kind == E5M2 else 3)
    keys, expected_keys = keys.float()[~untouched], expected_keys.float()[~untouched]
    if kind in KINDS:
        assert torch.allclose(keys, expected_keys, rtol=step, atol=step)
        assert (keys == expected_keys).float().mean() > 0.99
    else:
        assert close(keys, expected_keys, BF16 if BF16 in (dtype, kind) else FP32)
    assert torch.equal(values.float()[~untouched], expected_values.float()[~untouched])


@pytest.mark.parametrize("kind", [BF16, E4M3], ids=str)
def test_a_token_rotates_alone_as_among_others(kind: torch.dtype) -> None:
    problem = Rotation((6, 2, 128, 96, 7), BF16, kind)
    q, keys, values = problem.run(OPS)
    for token in (0, 3, 6):
        one, *caches = problem.run(OPS, slice(token, token + 1))
        place = problem.kv_index[token]
        assert torch.equal(one[0], q[token])
        for cache, whole in zip(caches, (keys, values), strict=True):
            rows, all_rows = (bits(each).flatten(0, 1)[place] for each in (cache, whole))
            assert torch.equal(rows, all_rows)


def test_padding_is_neither_rotated_nor_stored() -> None:
    problem = Rotation((6, 2, 64, 64, 7), BF16, BF16)
    problem.positions[2:4], problem.kv_index[2:4] = -1, 0
    q, *caches = problem.run(OPS)
    assert torch.equal(q[2:4], problem.merged[2:4, :6])
    kept = [token for token in range(7) if token not in (2, 3)]
    for cache in caches:
        assert cache[0].isnan().all()
        assert not cache.flatten(0, 1)[problem.kv_index[kept]].isnan().any()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_key_is_rounded_to_its_own_type_first(kind: torch.dtype) -> None:
    problem = Rotation((8, 8, 64, 64, 40), BF16, kind)
    problem.merged[:, 8:16] = problem.merged[:, :8]
    problem.scales = (0.5, 1.0)
    q, keys, _ = problem.run(OPS)
    assert torch.equal(bits(keys.flatten(0, 1)[problem.kv_index]), bits((q * 2).to(kind)))


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_number_is_stored_as_the_nearest(kind: torch.dtype, dtype: torch.dtype) -> None:
    values = hard_numbers().to(dtype)
    expected, nan = nearest(values, kind), values.isnan()
    codes = stored(OPS, values, kind)
    assert torch.equal(codes[~nan], expected[~nan])
    assert codes[nan].view(kind).isnan().all()


@pytest.mark.cases(1)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_numbers_are_divided_by_their_scale(
    kind: torch.dtype, dtype: torch.dtype, scale: float
) -> None:
    values = hard_numbers().to(dtype)
    quotient = quotients(values, scale)
    expected, nan = nearest(quotient, kind), quotient.isnan()
    codes = stored(OPS, values, kind, scale)
    assert torch.equal(codes[~nan], expected[~nan])
    assert codes[nan].view(kind).isnan().all()


@pytest.mark.cases(4)
@pytest.mark.parametrize("size", LATENTS, ids=str)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("kind", [None, E4M3, E5M2], ids=str)
@DTYPES
def test_latent_vectors_match_the_reference(
    dtype: torch.dtype, kind: torch.dtype | None, interleaved: bool, size: tuple[int, int]
) -> None:
    (rows, rope), heads, rank, scale = size, 3, 40, 0.3 if kind else 1.0
    given = latent_arguments(rows, rope, heads, rank, dtype)
    empty = torch.full((26, 4, 1, rank + rope), torch.nan).to(kind or dtype)
    index, caches = 4 + torch.randperm(100)[:rows], (empty.clone(), empty.clone())
    found, expected = (
        ops.rope_and_store_latent(*given, cache, index, scale, interleaved=interleaved)
        for ops, cache in zip((OPS, REF), caches, strict=True)
    )
    tolerance = 1e-6 if dtype == FP32 else 2**-7
    assert torch.allclose(found, expected, rtol=tolerance, atol=tolerance)
    step = 2**-2 if kind else tolerance
    one, other = (cache.float() for cache in caches)
    assert torch.allclose(one, other, rtol=step, atol=step, equal_nan=True)
    assert torch.equal(one[..., :rank].nan_to_num(7.0), other[..., :rank].nan_to_num(7.0))
    last = tuple(each[-1:] for each in given[:4])
    single = OPS.rope_and_store_latent(
        *last, given[4], given[5][-1:], empty, index[-1:], scale, interleaved=interleaved
    )
    assert torch.equal(single[0], found[-1])
    assert torch.equal(
        bits(empty).flatten(0, 1)[index[-1]], bits(caches[0]).flatten(0, 1)[index[-1]]
    )
