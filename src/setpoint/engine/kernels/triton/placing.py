"""Places: of a step's tokens in the tables and the cache, of their embeddings, of their experts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from setpoint.engine.kernels.triton.tiles import BLOCK, SEPARATE, blocks

TOKENS, ROWS = 64, 128
"""Tokens of a program of ``place_step``, and rows that it compares them with at a time."""
PAIRS = 256
"""Pairs of a token and an expert of a program."""


@triton.jit(
    do_not_specialize=["num_tokens", "num_rows"], do_not_specialize_on_alignment=["page_table"]
)
def place_step(
    slots,  # [num_rows] int32
    cu_q,  # [num_rows + 1] int32
    kv_lens,  # [num_rows] int32
    known,  # [slots, context] int32
    page_table,  # [slots, pages] int32
    ids,  # [num_tokens] int32, out
    positions,  # [num_tokens] int64, out
    kv_index,  # [num_tokens] int64, out
    num_tokens,
    num_rows,
    known_stride,
    table_stride,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    # A token's row is the number of rows that end before it.
    row = tl.zeros([TOKENS], tl.int32)
    for begin in range(0, num_rows, ROWS):
        other = begin + tl.arange(0, ROWS)
        ends = tl.load(cu_q + 1 + other, mask=other < num_rows, other=2147483647)
        row += tl.sum((ends[None, :] <= token[:, None]).to(tl.int32), 1)
    inside = token < num_tokens
    owned = inside & (row < num_rows)
    length = tl.load(kv_lens + row, mask=owned, other=0)
    position = token + length - tl.load(cu_q + 1 + row, mask=owned, other=0)
    owned = owned & (position >= 0)
    slot = tl.load(slots + row, mask=owned, other=0).to(tl.int64)
    number = tl.load(known + slot * known_stride + position, mask=owned, other=0)
    page = tl.load(page_table + slot * table_stride + position // PAGE, mask=owned, other=0)
    place = page.to(tl.int64) * PAGE + position % PAGE
    tl.store(ids + token, number, mask=inside)
    tl.store(positions + token, tl.where(owned, position, -1).to(tl.int64), mask=inside)
    tl.store(kv_index + token, tl.where(owned, place, 0), mask=inside)


def place_tokens(
    slots: torch.Tensor,
    cu_q: torch.Tensor,
    kv_lens: torch.Tensor,
    known: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    num_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``Ops.place_tokens``. A token that no row owns, or whose row has the length 0, only pads
    the step: it gets the id 0, the position -1, which the other operations know, and the first
    place of page 0."""
    given = (slots, cu_q, kv_lens, known, page_table)
    assert all(each.dtype == torch.int32 and each.stride(-1) == 1 for each in given)
    ids = torch.empty(num_tokens, dtype=torch.int32, device=slots.device)
    positions, kv_index = (
        torch.empty(num_tokens, dtype=torch.int64, device=slots.device) for _ in range(2)
    )
    place_step[(blocks(num_tokens, TOKENS),)](
        *given, ids, positions, kv_index, num_tokens, len(slots), known.stride(0),
        page_table.stride(0), page_size, TOKENS, ROWS, num_warps=4, **SEPARATE,
    )  # fmt: skip
    return ids, positions, kv_index


@triton.jit
def take_rows(
    ids,  # [T] int32
    weight,  # [rows, columns]
    out,  # [T, columns]
    columns,
    scale,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    row = tl.load(ids + token).to(tl.int64)
    values = tl.load(weight + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.cast(scale, tl.float32).to(out.dtype.element_ty).to(tl.float32)
    product = (values * factor).to(out.dtype.element_ty)
    tl.store(out + token * columns + column, product, mask=inside)


def embedding(ids: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
    """See ``Ops.embedding``."""
    assert ids.dtype == torch.int32
    assert weight.is_contiguous()
    tokens, columns = len(ids), weight.shape[1]
    out = torch.empty((tokens, columns), dtype=weight.dtype, device=weight.device)
    take_rows[(tokens, blocks(columns))](
        ids, weight, out, columns, scale, BLOCK, num_warps=4, **SEPARATE
    )
    return out


@triton.jit(do_not_specialize=["num_pairs"])
def place_pairs(
    ids,  # [T, CHOSEN] int32
    positions,  # [T] int64, or None
    places,  # [experts, places_stride] int32
    slots,  # [T, CHOSEN] int32, out
    load,  # [slots] int64, in and out
    num_pairs,
    places_stride,
    CHOSEN: tl.constexpr,
    MOVES: tl.constexpr,  # whether there are places
    PAIRS: tl.constexpr,
):
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    inside = pair < num_pairs
    slot = tl.load(ids + pair, mask=inside, other=0)
    position = tl.full([PAIRS], 0, tl.int64)
    if positions is not None:
        position = tl.load(positions + pair // CHOSEN, mask=inside, other=-1)
    if MOVES:
        row = places + slot.to(tl.int64) * places_stride
        count = tl.load(row, mask=inside, other=1)
        slot = tl.load(row + 1 + tl.maximum(position, 0) % count, mask=inside, other=0)
        tl.store(slots + pair, slot, mask=inside)
    one = tl.full([PAIRS], 1, tl.int64)
    tl.atomic_add(load + slot, one, mask=inside & (position >= 0), sem="relaxed")


def place_experts(
    ids: torch.Tensor,
    load: torch.Tensor,
    positions: torch.Tensor | None,
    places: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``Ops.place_experts``. Tokens that only pad the step are not counted."""
    assert ids.dtype == torch.int32
    assert ids.is_contiguous()
    assert load.dtype == torch.int64
    assert positions is None or positions.dtype == torch.int64
    assert places is None or positions is not None
    slots = ids if places is None else torch.empty_like(ids)
    place_pairs[(blocks(ids.numel(), PAIRS),)](
        ids, positions, places, slots, load, ids.numel(), 0 if places is None else places.stride(0),
        ids.shape[1], places is not None, PAIRS, num_warps=4, **SEPARATE,
    )  # fmt: skip
    return slots
