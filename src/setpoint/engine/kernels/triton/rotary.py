"""Rotary embedding of a step's queries and keys, and their way into the cache.

A token with a negative position only pads its step: nothing of it is read or written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from setpoint.engine.kernels.triton.fp8 import MANTISSAS, codes, to_cache
from setpoint.engine.kernels.triton.tiles import BLOCK, SEPARATE, blocks, warps, width


@triton.jit
def _rotated(x, apart: tl.constexpr, inside, cos, sin):
    """Both halves of the rotated pairs whose first numbers are at x, and whose second ones are
    ``apart`` behind them."""
    first = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + apart, mask=inside, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _angles(cos_sin, position, HALF: tl.constexpr, WIDTH: tl.constexpr):
    """cos and sin of a position, [1, WIDTH] each."""
    pairs = tl.arange(0, WIDTH)
    at = cos_sin + position * 2 * HALF + pairs
    cos = tl.load(at, mask=pairs < HALF, other=0.0)
    sin = tl.load(at + HALF, mask=pairs < HALF, other=0.0)
    return cos[None, :], sin[None, :]


@triton.jit
def rotate_and_store(
    q,  # [T, HEADS, D], in and out
    k,  # [T, KV_HEADS, D]
    v,  # [T, KV_HEADS, D]
    cos_sin,  # [positions, 2 HALF]
    positions,  # [T] int64
    k_cache,  # [places, KV_HEADS, D]
    v_cache,
    kv_index,  # [T] int64
    q_stride,
    k_stride,
    v_stride,
    k_scale,
    v_scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,  # heads of a program
    HALF_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
    MANTISSA: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    if position < 0:
        return
    cos, sin = _angles(cos_sin, position, HALF, HALF_WIDTH)
    pairs = tl.arange(0, HALF_WIDTH)[None, :]
    q_tiles: tl.constexpr = (HEADS + TILE - 1) // TILE
    tile = tl.program_id(1)
    if tile < q_tiles:
        heads = (tile * TILE + tl.arange(0, TILE))[:, None]
        at = q + token * q_stride + heads * D + pairs
        inside = (heads < HEADS) & (pairs < HALF)
        first, second = _rotated(at, HALF, inside, cos, sin)
        tl.store(at, first.to(q.dtype.element_ty), mask=inside)
        tl.store(at + HALF, second.to(q.dtype.element_ty), mask=inside)
    else:
        heads = ((tile - q_tiles) * TILE + tl.arange(0, TILE))[:, None]
        place = (tl.load(kv_index + token) * KV_HEADS + heads) * D
        _store_heads(
            k + token * k_stride + heads * D, v + token * v_stride + heads * D, k_cache + place,
            v_cache + place, heads < KV_HEADS, cos, sin, k_scale, v_scale, D, HALF, HALF_WIDTH,
            WIDTH, MANTISSA,
        )  # fmt: skip


@triton.jit
def _store_heads(
    k,  # [TILE, 1] pointers, as are the next three
    v,
    k_place,
    v_place,
    exist,  # [TILE, 1]
    cos,
    sin,
    k_scale,
    v_scale,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HALF_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
    MANTISSA: tl.constexpr,
):
    pairs = tl.arange(0, HALF_WIDTH)[None, :]
    dims = tl.arange(0, WIDTH)[None, :]
    plain: tl.constexpr = k.dtype.element_ty
    cached: tl.constexpr = k_place.dtype.element_ty
    inside = exist & (pairs < HALF)
    first, second = _rotated(k + pairs, HALF, inside, cos, sin)
    # A rotated key is rounded to its own type first, as if it had been handed on.
    tl.store(k_place + pairs, to_cache(first.to(plain), k_scale, cached, MANTISSA), mask=inside)
    tl.store(
        k_place + HALF + pairs, to_cache(second.to(plain), k_scale, cached, MANTISSA), mask=inside
    )
    if 2 * HALF < D:
        rest = exist & (dims >= 2 * HALF) & (dims < D)
        kept = tl.load(k + dims, mask=rest, other=0.0)
        tl.store(k_place + dims, to_cache(kept, k_scale, cached, MANTISSA), mask=rest)
    value = tl.load(v + dims, mask=exist & (dims < D), other=0.0)
    tl.store(v_place + dims, to_cache(value, v_scale, cached, MANTISSA), mask=exist & (dims < D))


def rope_and_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_index: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """See ``Ops.rope_and_store``. Rotates q in place and returns it; k stays unchanged."""
    tokens, heads, size = q.shape
    kv_heads, rotary = k.shape[1], cos_sin.shape[1]
    assert all(each.stride()[1:] == (size, 1) for each in (q, k, v))
    assert cos_sin.dtype == torch.float32
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    span = width(size)
    tile = max(BLOCK // span, 1)
    rotate_and_store[(tokens, blocks(heads, tile) + blocks(kv_heads, tile))](
        q, k, v, cos_sin, positions, codes(k_cache), codes(v_cache), kv_index,
        q.stride(0), k.stride(0), v.stride(0), k_scale, v_scale, heads, kv_heads, size,
        rotary // 2, tile, width(rotary // 2), span, MANTISSAS.get(k_cache.dtype, 0),
        num_warps=warps(tile * span), **SEPARATE,
    )  # fmt: skip
    return q


@triton.jit
def rotate_and_store_latent(
    q_latent,  # [T, HEADS, RANK]
    q_rope,  # [T, HEADS, 2 HALF]
    latent,  # [T, RANK]
    k_rope,  # [T, 2 HALF]
    cos_sin,  # [positions, 2 HALF]
    positions,  # [T] int64
    q,  # [T, HEADS, RANK + 2 HALF], out
    cache,  # [places, RANK + 2 HALF]
    kv_index,  # [T] int64
    q_stride,
    q_head,
    k_stride,
    scale,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,  # heads of a program; the last program of a token has its key
    RANK_WIDTH: tl.constexpr,
    HALF_WIDTH: tl.constexpr,
    MANTISSA: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    if position < 0:
        return
    size: tl.constexpr = RANK + 2 * HALF
    tiles: tl.constexpr = (HEADS + TILE - 1) // TILE
    cos, sin = _angles(cos_sin, position, HALF, HALF_WIDTH)
    dims = tl.arange(0, RANK_WIDTH)[None, :]
    pairs = tl.arange(0, HALF_WIDTH)[None, :]
    firsts = 2 * pairs if INTERLEAVED else pairs
    apart: tl.constexpr = 1 if INTERLEAVED else HALF
    tile = tl.program_id(1)
    if tile < tiles:
        heads = (tile * TILE + tl.arange(0, TILE))[:, None]
        row = token * HEADS + heads
        inside = (heads < HEADS) & (dims < RANK)
        kept = tl.load(q_latent + row * RANK + dims, mask=inside, other=0.0)
        tl.store(q + row * size + dims, kept, mask=inside)
        inside = (heads < HEADS) & (pairs < HALF)
        at = q_rope + token * q_stride + heads * q_head + firsts
        first, second = _rotated(at, apart, inside, cos, sin)
        target = q + row * size + RANK + pairs
        tl.store(target, first.to(q.dtype.element_ty), mask=inside)
        tl.store(target + HALF, second.to(q.dtype.element_ty), mask=inside)
    else:
        place = cache + tl.load(kv_index + token) * size
        _store_latent(
            latent + token * RANK, k_rope + token * k_stride + firsts, apart, place, cos, sin,
            scale, RANK, HALF, RANK_WIDTH, HALF_WIDTH, MANTISSA,
        )  # fmt: skip


@triton.jit
def _store_latent(
    latent,  # pointers, as are the next and ``place``
    k_rope,
    apart: tl.constexpr,
    place,
    cos,
    sin,
    scale,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    RANK_WIDTH: tl.constexpr,
    HALF_WIDTH: tl.constexpr,
    MANTISSA: tl.constexpr,
):
    dims, pairs = tl.arange(0, RANK_WIDTH), tl.arange(0, HALF_WIDTH)[None, :]
    plain: tl.constexpr = latent.dtype.element_ty
    cached: tl.constexpr = place.dtype.element_ty
    kept = tl.load(latent + dims, mask=dims < RANK, other=0.0)
    tl.store(place + dims, to_cache(kept, scale, cached, MANTISSA), mask=dims < RANK)
    first, second = _rotated(k_rope, apart, pairs < HALF, cos, sin)
    place += RANK + pairs
    tl.store(place, to_cache(first.to(plain), scale, cached, MANTISSA), mask=pairs < HALF)
    tl.store(place + HALF, to_cache(second.to(plain), scale, cached, MANTISSA), mask=pairs < HALF)


def rope_and_store_latent(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    cache: torch.Tensor,
    kv_index: torch.Tensor,
    scale: float = 1.0,
    *,
    interleaved: bool,
) -> torch.Tensor:
    """See ``Ops.rope_and_store_latent``."""
    assert all(each.is_contiguous() for each in (q_latent, latent, cache))
    assert q_rope.stride(2) == k_rope.stride(1) == 1
    assert cos_sin.dtype == torch.float32
    tokens, heads, rank = q_latent.shape
    rotary = k_rope.shape[1]
    q = torch.empty((tokens, heads, rank + rotary), dtype=q_latent.dtype, device=q_latent.device)
    span = width(rank)
    tile = max(BLOCK // span, 1)
    rotate_and_store_latent[(tokens, blocks(heads, tile) + 1)](
        q_latent, q_rope, latent, k_rope, cos_sin, positions, q, codes(cache), kv_index,
        q_rope.stride(0), q_rope.stride(1), k_rope.stride(0), scale, heads, rank,
        rotary // 2, tile, span, width(rotary // 2), MANTISSAS.get(cache.dtype, 0), interleaved,
        num_warps=warps(tile * span), **SEPARATE,
    )  # fmt: skip
    return q
