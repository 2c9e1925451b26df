"""Products of rows with the weight of an expert each, of all rows with one weight, and of the heads
of rows with a weight each.

Nothing goes back to the host, and grids depend on shapes only. Pairs of a row and an expert are put
in the order of experts, and cut into tiles of rows that share one; there are as many tiles as the
pairs could need, and those that are left over do nothing. A pair's bits do not depend on the other
pairs, but on how many there are, because few are cut into lower tiles than many; unless the tile is
``fixed_tile``: one compiled kernel then serves any number of rows, and adds up K in one order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from setpoint.engine.kernels.triton.tiles import SEPARATE, blocks, width

SCAN = 2048
"""Pairs that ``sort_pairs`` looks at together."""
GROUP = 128
"""Inputs that share a scale, if those of a row do not all."""
PLAIN, BY_ROW, BY_GROUP = range(3)
"""How numbers are scaled: not at all; with a scale for each row and each output; with one for each
GROUP inputs of them."""


@dataclass(slots=True, frozen=True)
class Tile:
    """What a program computes: ``height`` rows of ``width`` outputs, ``depth`` inputs at a time."""

    height: int
    width: int
    depth: int
    stages: int
    """Loads that are under way at the same time."""


def tile_of(pairs: int, experts: int, element: int) -> Tile:
    """element: bytes of a number. Few rows are limited by reading weights, many by multiplying."""
    depth = GROUP // element
    return Tile(16, 64, depth, 5) if pairs < 32 * experts else Tile(64, 128, depth, 3)


MANY_COLUMNS = 16_384
"""So many outputs make enough tiles of the larger width to keep a chip busy."""


def fixed_tile(columns: int, element: int) -> Tile:
    """The tile of products whose rows have the same bits in every batch, which no number of rows
    may choose. Its height is that of the largest instruction of one group of warps (64 rows): a
    product of few rows is limited by reading weights all the same."""
    depth = GROUP // element
    return Tile(64, 128, depth, 3) if columns >= MANY_COLUMNS else Tile(64, 64, depth, 5)


@triton.jit(do_not_specialize=["num_pairs", "first"])
def sort_pairs(
    ids,  # [num_pairs] int32
    order,  # [num_pairs] int32, out: the pairs of expert 0, of expert 1, …
    starts,  # [num_experts + 1] int32, out: the place of the first pair of each
    num_pairs,
    first,
    SCAN: tl.constexpr,
):
    expert = tl.program_id(0)
    lanes = tl.arange(0, SCAN)
    before = tl.zeros([SCAN], tl.int32)
    for begin in range(0, num_pairs, SCAN):
        pair = begin + lanes
        number = tl.load(ids + pair, mask=pair < num_pairs, other=-1) - first
        before += ((number >= 0) & (number < expert)).to(tl.int32)
    place = tl.sum(before, 0)
    tl.store(starts + expert, place)
    if expert < tl.num_programs(0) - 1:
        for begin in range(0, num_pairs, SCAN):
            pair = begin + lanes
            number = tl.load(ids + pair, mask=pair < num_pairs, other=-1) - first
            here = number == expert
            count = tl.cumsum(here.to(tl.int32), 0)
            tl.store(order + place + count - 1, pair, mask=here)
            place += tl.sum(here.to(tl.int32), 0)


@triton.jit
def _tile_of_expert(starts, tile, num_experts, HEIGHT: tl.constexpr, EXPERTS: tl.constexpr):
    """(expert of a tile, num_experts or more if it is left over; the places of its rows)"""
    number = tl.arange(0, EXPERTS)
    exists = number < num_experts
    begin = tl.load(starts + number, mask=exists, other=0)
    end = tl.load(starts + number + 1, mask=exists, other=0)
    tiles = (end - begin + HEIGHT - 1) // HEIGHT
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    earlier = tl.sum(tl.where(number < expert, tiles, 0), 0)
    start = tl.sum(tl.where(number == expert, begin, 0), 0)
    return expert, start + (tile - earlier) * HEIGHT + tl.arange(0, HEIGHT)


@triton.jit
def _summed(
    x,
    x_scales,
    row,
    begin,  # where in x each row begins
    weights,
    weight_scales,
    output,
    DEPTH: tl.constexpr,
    SCALED: tl.constexpr,
    TILE_HEIGHT: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
):
    """The products of rows of x and of weights, [TILE_HEIGHT, TILE_WIDTH]; with the scales of
    groups, but not those of whole rows."""
    depth = tl.arange(0, TILE_DEPTH)
    left = x + begin[:, None] + depth[None, :]
    right = weights + output[None, :] * DEPTH + depth[:, None]
    groups: tl.constexpr = (DEPTH + TILE_DEPTH - 1) // TILE_DEPTH
    whole: tl.constexpr = x.dtype.element_ty == tl.int8
    total = tl.zeros([TILE_HEIGHT, TILE_WIDTH], tl.int32 if whole else tl.float32)
    for group in range(groups):
        if DEPTH % TILE_DEPTH == 0:
            a, b = tl.load(left), tl.load(right)
        else:
            exists = depth < DEPTH - group * TILE_DEPTH
            a = tl.load(left, mask=exists[None, :], other=0.0)
            b = tl.load(right, mask=exists[:, None], other=0.0)
        if SCALED == 2:
            row_scale = tl.load(x_scales + row * groups + group)
            column_scale = tl.load(weight_scales + output * groups + group)
            part = tl.dot(a, b, out_dtype=tl.float32)
            total += part * (row_scale[:, None] * column_scale[None, :])
        elif whole:
            total = tl.dot(a, b, total, out_dtype=tl.int32)
        elif SCALED == 1:
            # Sums of fp8 are exact to 14 bits only (Hopper), so each is short.
            total += tl.dot(a, b, out_dtype=tl.float32)
        else:
            total = tl.dot(a, b, total, input_precision="ieee")
        left += TILE_DEPTH
        right += TILE_DEPTH
    return total


@triton.jit(do_not_specialize=["num_rows"])
def multiply_tiles(
    x,  # [num_pairs / PER_ROW, DEPTH]; of heads [num_rows, num_experts, DEPTH], with strides
    x_scales,  # fp32 [num_pairs / PER_ROW, groups]
    weights,  # [num_experts, columns, DEPTH]
    weight_scales,  # fp32 [num_experts, columns, groups]
    biases,  # [num_experts, columns]
    order,  # see ``sort_pairs``
    starts,
    out,  # [num_pairs, columns]
    num_rows,  # pairs, or rows of which each has every head
    num_experts,
    columns,
    row_stride,
    head_stride,
    DEPTH: tl.constexpr,
    PER_ROW: tl.constexpr,
    SORTED: tl.constexpr,  # whether there is an order; else there is one expert,
    HEADS: tl.constexpr,  # or one for each head
    SCALED: tl.constexpr,  # PLAIN, BY_ROW or BY_GROUP
    ADDS: tl.constexpr,  # whether there are biases
    EXPERTS: tl.constexpr,
    TILE_HEIGHT: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
):
    if SORTED:
        expert, place = _tile_of_expert(starts, tl.program_id(1), num_experts, TILE_HEIGHT, EXPERTS)
        if expert >= num_experts:
            return
        inside = place < tl.load(starts + expert + 1)
        pair = tl.load(order + place, mask=inside, other=0)
        base = expert.to(tl.int64) * columns
    else:
        base = 0
        place = tl.program_id(1) * TILE_HEIGHT + tl.arange(0, TILE_HEIGHT)
        inside = place < num_rows
        pair = tl.where(inside, place, 0)
    # Rows and outputs that do not exist read others, and are not stored.
    row = (pair // PER_ROW).to(tl.int64)
    begin = row * DEPTH
    if HEADS:
        head = tl.program_id(2)
        base = head.to(tl.int64) * columns
        begin = row * row_stride + head * head_stride
        pair = pair * num_experts + head
    column = tl.program_id(0) * TILE_WIDTH + tl.arange(0, TILE_WIDTH)
    output = base + tl.minimum(column, columns - 1).to(tl.int64)
    total = _summed(
        x, x_scales, row, begin, weights, weight_scales, output, DEPTH, SCALED, TILE_HEIGHT,
        TILE_WIDTH, TILE_DEPTH,
    )  # fmt: skip
    found = total.to(tl.float32)
    if SCALED == 1:
        row_scale, column_scale = tl.load(x_scales + row), tl.load(weight_scales + output)
        found = found * (row_scale[:, None] * column_scale[None, :])
    if ADDS:
        found += tl.load(biases + output).to(tl.float32)[None, :]
    target = out + pair.to(tl.int64)[:, None] * columns + column[None, :]
    stored = inside[:, None] & (column < columns)[None, :]
    tl.store(target, found.to(out.dtype.element_ty), mask=stored)


@dataclass(slots=True, frozen=True)
class Scales:
    """Scales of rows and of weights: fp32 [rows, G] and [E, N, G], where G is 1 or K / GROUP,
    rounded up."""

    rows: torch.Tensor
    weights: torch.Tensor


def multiply_pairs(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor | None,
    *,
    dtype: torch.dtype,
    first: int = 0,
    biases: torch.Tensor | None = None,
    scales: Scales | None = None,
    fixed: bool = False,
) -> torch.Tensor:
    """See ``quant.grouped.GroupedWeight``: x · weights[ids - first]ᵀ + biases in ``dtype``, summed
    in fp32, and if x and the weights are int8 exactly. weights: [E, N, K]. ids: None: all rows meet
    the only weight. fixed: a row has the same bits, however many there are."""
    assert x.is_contiguous()
    if fixed and x.data_ptr() % 16:
        x = x.clone()  # another alignment is another compiled kernel
    (experts, columns, _), device = weights.shape, x.device
    pairs = len(x) if ids is None else ids.numel()
    element = x.element_size()
    tile = fixed_tile(columns, element) if fixed else tile_of(pairs, experts, element)
    tiles, order, starts = blocks(pairs, tile.height), None, None
    if ids is not None:
        assert ids.dtype == torch.int32
        assert ids.is_contiguous()
        order = torch.empty(pairs, dtype=torch.int32, device=device)
        starts = torch.empty(experts + 1, dtype=torch.int32, device=device)
        sort_pairs[(experts + 1,)](ids, order, starts, pairs, first, SCAN, num_warps=8, **SEPARATE)
        tiles = min(pairs, pairs // tile.height + experts)
    out = torch.empty((pairs, columns), dtype=dtype, device=device)
    _multiply(x, weights, out, tile, tiles, biases, scales, (order, starts), pairs // len(x))
    return out


def multiply_heads(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """x [T, H, K], of which the first two dimensions may be strided, and weights [H, N, K] -> x[:,
    h] · weights[h]ᵀ, [T, H, N]. A row has the same bits, however many there are."""
    assert x.stride(2) == 1
    (rows, heads, _), columns = x.shape, weights.shape[1]
    out = torch.empty((rows, heads, columns), dtype=x.dtype, device=x.device)
    tile = fixed_tile(columns, x.element_size())
    _multiply(x, weights, out, tile, blocks(rows, tile.height))
    return out


def _multiply(
    x: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    tile: Tile,
    tiles: int,
    biases: torch.Tensor | None = None,
    scales: Scales | None = None,
    sorted_pairs: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    per_row: int = 1,
) -> None:
    """Launch ``multiply_tiles``. tiles: of rows. sorted_pairs: what ``sort_pairs`` writes."""
    assert weights.is_contiguous()
    assert x.dtype == weights.dtype
    (experts, columns, depth), heads = weights.shape, out.dim() == 3
    scaled = PLAIN
    if scales is not None:
        assert scales.rows.is_contiguous()
        assert scales.weights.is_contiguous()
        scaled = BY_ROW if scales.rows.shape[1] == 1 else BY_GROUP
        assert scaled == BY_ROW or tile.depth == GROUP
    strides = x.stride()[:2] if heads else (0, 0)
    multiply_tiles[(blocks(columns, tile.width), tiles, experts if heads else 1)](
        x, scales and scales.rows, weights, scales and scales.weights, biases, *sorted_pairs, out,
        len(out), experts, columns, *strides, depth, per_row, sorted_pairs[0] is not None, heads,
        scaled, biases is not None, width(experts), tile.height, tile.width, tile.depth,
        num_warps=4, num_stages=tile.stages, **SEPARATE,
    )  # fmt: skip
