"""Choices among the logits of a vocabulary. Several programs share a row: one alone would read its
152,000 numbers while the rest of the GPU has nothing to do."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from setpoint.engine.kernels.triton.tiles import BLOCK, SEPARATE, blocks, width

CHUNK = 4096
"""Logits among which a program of ``best_of_chunks`` chooses."""


@triton.jit
def best_of_chunks(
    logits,  # [S, columns], rows ``stride`` apart
    bests,  # [S, chunks] fp32, out
    places,  # [S, chunks] int32, out
    columns,
    stride,
    CHUNK: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row * stride + column, mask=column < columns, other=float("-inf")).to(
        tl.float32
    )
    # No token is chosen from a row with a NaN, as from one with an infinity.
    values = tl.where(values != values, float("inf"), values)
    best, place = tl.max(values, 0, return_indices=True)
    at = row * tl.num_programs(1) + chunk
    tl.store(bests + at, best)
    tl.store(places + at, chunk * CHUNK + place)


@triton.jit
def best_of_rows(
    bests,  # [S, CHUNKS] fp32
    places,  # [S, CHUNKS] int32
    out,  # [S] int64
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, WIDTH)
    values = tl.load(bests + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=float("-inf"))
    best, first = tl.max(values, 0, return_indices=True)
    place = tl.load(places + row * CHUNKS + tl.minimum(first, CHUNKS - 1)).to(tl.int64)
    tl.store(out + row, tl.where(tl.abs(best) < float("inf"), place, -1))


def best_tokens(logits: torch.Tensor) -> torch.Tensor:
    """See ``Ops.best_tokens``."""
    assert logits.stride(1) == 1
    (rows, columns), device = logits.shape, logits.device
    chunks = blocks(columns, CHUNK)
    bests = torch.empty((rows, chunks), dtype=torch.float32, device=device)
    places = torch.empty((rows, chunks), dtype=torch.int32, device=device)
    out = torch.empty(rows, dtype=torch.int64, device=device)
    best_of_chunks[(rows, chunks)](
        logits, bests, places, columns, logits.stride(0), CHUNK, num_warps=4, **SEPARATE
    )
    best_of_rows[(rows,)](bests, places, out, chunks, width(chunks), num_warps=1, **SEPARATE)
    return out


@triton.jit
def order_keys(
    logits,  # [S, columns], rows ``stride`` apart
    keys,  # [S, columns] int64, out
    columns,
    stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    values = tl.load(logits + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # adding zero turns -0 into 0
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    key = (ordered << 32) | (columns - 1 - column).to(tl.int64)
    tl.store(keys + row * columns + column, key, mask=inside)


def top_tokens(logits: torch.Tensor, count: int) -> torch.Tensor:
    """See ``Ops.top_tokens``. ``topk`` does not say which of equal values come first, so every
    token gets a key of its own, as in the reference."""
    assert logits.stride(1) == 1
    keys = torch.empty(logits.shape, dtype=torch.int64, device=logits.device)
    rows, columns = logits.shape
    order_keys[(rows, blocks(columns))](
        logits, keys, columns, logits.stride(0), BLOCK, num_warps=4, **SEPARATE
    )
    return keys.topk(count, dim=-1).indices


@triton.jit
def sum_exponentials(
    logits,  # fp32 [R, columns]
    out,  # fp32 [R], out
    columns,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * columns
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        values = tl.load(logits + column, mask=column < columns, other=float("-inf"))
        highest = tl.maximum(highest, values)
    top = tl.max(highest, 0)
    # A row without a finite logit has no highest one to subtract. A NaN is in the sum anyway.
    top = tl.where(tl.abs(top) < float("inf"), top, 0.0)
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        values = tl.load(logits + column, mask=column < columns, other=float("-inf"))
        total += tl.exp(values - top)
    tl.store(out + row, tl.log(tl.sum(total, 0)) + top)


def log_sum_exp(logits: torch.Tensor) -> torch.Tensor:
    """See ``Ops.log_sum_exp``. One program sums a row, whatever the others are; torch would divide
    the sums of few rows among more threads than those of many."""
    assert logits.is_contiguous()
    assert logits.dtype == torch.float32
    rows, columns = logits.shape
    out = torch.empty((rows, 1), dtype=torch.float32, device=logits.device)
    sum_exponentials[(rows,)](logits, out, columns, 4 * BLOCK, num_warps=8, **SEPARATE)
    return out


@triton.jit
def mask_rows(
    logits,  # [S, columns], in and out
    rows,  # [R] int64
    words,  # [R, words_stride] int32
    columns,
    words_stride,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    word = tl.load(words + number * words_stride + column // 32, mask=inside, other=0)
    refused = inside & (((word >> (column % 32)) & 1) == 0)
    at = logits + tl.load(rows + number) * columns + column
    tl.store(at, tl.full([BLOCK], float("-inf"), logits.dtype.element_ty), mask=refused)


def mask_tokens(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    """See ``Ops.mask_tokens``."""
    assert logits.is_contiguous()
    assert rows.dtype == torch.int64
    assert words.dtype == torch.int32
    assert words.stride(1) == 1
    columns = logits.shape[1]
    mask_rows[(len(rows), blocks(columns))](
        logits, rows, words, columns, words.stride(0), BLOCK, num_warps=4, **SEPARATE
    )


@triton.jit
def _tanh(x):
    """The hyperbolic tangent. Near zero, where a difference from 1 would lose digits, it is the
    polynomial whose largest relative error below 0.625 is the least (4e-9)."""
    size = tl.abs(x)
    square = x * x
    tail = square * -0.0057049594 + 0.0206390600
    tail = tail * square - 0.0537397057
    tail = tail * square + 0.1333144207
    tail = tail * square - 0.3333328194
    near = x + x * square * tail
    far = 1.0 - 2.0 / (1.0 + tl.exp(size * 2.0))
    return tl.where(size < 0.625, near, tl.where(x < 0, -far, far))


@triton.jit
def cap_elements(x, num_elements, cap, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_elements
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + at, (_tanh(values / cap) * cap).to(x.dtype.element_ty), mask=inside)


def soft_cap(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """See ``Ops.soft_cap``."""
    assert logits.is_contiguous()
    size = logits.numel()
    cap_elements[(blocks(size),)](logits, size, cap, BLOCK, num_warps=4, **SEPARATE)
    return logits
