"""Attention over the paged pool in Triton: the kernels.

The rows of a step are of two classes: *narrow* rows have one token, *wide* rows have more (or all
rows are wide, ``RowClass.every``). A wide
row's tokens form blocks of queries; a narrow row is one block. The positions that a row sees are
cut into pieces, so that a long prefix keeps the whole chip busy even for a single token. For each
class three kernels run:

  attention_plan    once per step: from the lengths, which lie on the device, how each row is cut
  attention_pieces  one program per (block, piece) and key/value head. The result of a row with one
                    piece is final; of the others it is a sum of weighted values that is not divided
  attention_merge   joins the pieces of each token and head

No grid depends on lengths, so that one captured graph serves all of them. How a row is cut depends
on its own number of tokens and its own length alone, pieces are joined in one order, and nothing is
contracted to fused operations: a row's result has the same bits in every batch and at every
padding. Sizes are in ``kernels.triton.attention_sizes``, launches in
``attention.triton_attention``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from setpoint.engine.kernels.triton import attention_sizes

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)
"""The largest score before there is one. It is finite, so that the difference of two of them is 0
where nothing is seen."""
GRAIN = tl.constexpr(attention_sizes.GRAIN)
WHOLE = tl.constexpr(1 << 30)
"""The size of a piece that holds everything."""
DOUBLINGS = tl.constexpr(attention_sizes.DOUBLINGS)


@triton.jit(do_not_specialize=["n", "window"])
def attention_plan(
    kv_lens, cu_q, plan, n, window,
    BLOCK_Q: tl.constexpr, PIECE: tl.constexpr, MOST: tl.constexpr, WORK: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr, EVERY: tl.constexpr,
):  # fmt: skip
    """Write the plan [FIELDS, n] of one class. Rows of the other have no items. window 0: none."""
    rows = tl.arange(0, ROWS)
    inside = rows < n
    lens = tl.load(kv_lens + rows, mask=inside, other=0)
    begins = tl.load(cu_q + rows, mask=inside, other=0)
    count = tl.load(cu_q + rows + 1, mask=inside, other=0) - begins
    mine = count > 0 if EVERY else count > 1 if WIDE else count == 1
    blocks = tl.where(mine, (count + BLOCK_Q - 1) // BLOCK_Q, 1)
    limit = tl.minimum(tl.maximum(WORK // blocks, 1), MOST)
    span = lens - _origin(lens - count, window)
    size = tl.zeros_like(span) + PIECE
    for _ in tl.static_range(DOUBLINGS):
        size = tl.where(size * limit < span, size * 2, size)
    size = tl.where(limit == 1, WHOLE, size)
    # A padding row has one piece, in which there is nothing: its result is 0.
    splits = tl.where(mine, tl.maximum((span + size - 1) // size, 1), 0)
    joined = tl.where(splits > 1, count, 0)
    units = joined * splits
    tl.store(plan + rows, tl.cumsum(blocks * splits, 0), mask=inside)
    tl.store(plan + n + rows, size, mask=inside)
    tl.store(plan + 2 * n + rows, splits, mask=inside)
    tl.store(plan + 3 * n + rows, tl.cumsum(units, 0) - units, mask=inside)
    tl.store(plan + 4 * n + rows, tl.cumsum(joined, 0), mask=inside)


@triton.jit
def _origin(start, window):
    """The first position of a row's first piece; start: the position of the row's first token."""
    return tl.where(window > 0, tl.maximum(start - window + 1, 0), 0) // GRAIN * GRAIN


@triton.jit
def _of_turn(plan, n, field, turn, turns, room, ROWS: tl.constexpr):
    """A running sum of the plan, and its part (begin, end) that belongs to this turn. Rows take
    turns if their units exceed the scratch memory; a row's turn is that of its first unit."""
    rows = tl.arange(0, ROWS)
    inside = rows < n
    sums = tl.load(plan + field * n + rows, mask=inside, other=2147483647)
    units = tl.load(plan + 3 * n + rows, mask=inside, other=0)
    turn_of = tl.minimum(units // room, turns - 1)
    begin = tl.max(tl.where(inside & (turn_of < turn), sums, 0), 0)
    end = tl.max(tl.where(inside & (turn_of <= turn), sums, 0), 0)
    return sums, begin, end


@triton.jit
def _operand(x, dtype: tl.constexpr):
    """x as an operand of a product in ``dtype``. Triton 3.6 converts e5m2 to bf16 with an
    instruction that sm_80 lacks; through fp16, whose exponent e5m2 has, it is exact everywhere."""
    if x.dtype == tl.float8e5:
        x = x.to(tl.float16)
    return x.to(dtype)


@triton.jit
def _columns(
    base, rows, seen, FIRST: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """[rows, BLOCK]: columns FIRST.. of the rows at offsets ``rows`` that are seen, 0 elsewhere."""
    columns = tl.arange(0, BLOCK)
    mask = seen[:, None]
    if COUNT < BLOCK:
        mask = mask & (columns < COUNT)[None, :]
    return tl.load(base + rows[:, None] + FIRST + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _capped(score, softcap):
    """softcap · tanh(score / softcap)."""
    ratio = tl.exp2(tl.abs(score / softcap) * (-2.0 * LOG2E))
    return tl.where(score < 0, -softcap, softcap) * (1.0 - ratio) / (1.0 + ratio)


@triton.jit
def _divided(acc, best, weight, sink, v_scale, SINKS: tl.constexpr):
    """The result: acc [M, DV] by the sum of the weights [M], with the sinks [M] in it. It is 0
    where nothing was seen; NaN stays."""
    if SINKS:
        sink = sink * LOG2E
        now = tl.maximum(best, sink)
        share = tl.exp2(best - now)
        acc = acc * share[:, None]
        weight = weight * share + tl.exp2(sink - now)
    return acc / tl.where(weight == 0.0, 1.0, weight)[:, None] * v_scale


@triton.jit
def _attend(
    query, query_rest, k_cache, v_cache, table, kv_head, low, high, first, position,
    window, scale, softcap,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, V_STRIDE: tl.constexpr,
    PAGE: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr, WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Queries [M] at ``position`` over the positions low..high-1 of their row, of which none before
    ``first`` is read -> the sum of weighted values, the largest score (base 2) and the sum of
    weights."""
    best = tl.full([BLOCK_M], LOWEST, tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for begin in range(low, high, BLOCK_N):
        at = begin + tl.arange(0, BLOCK_N)
        seen = (at >= first) & (at < high)
        page = tl.load(table + at // PAGE, mask=seen, other=0).to(tl.int64)
        token = (page * PAGE + at % PAGE) * KV_HEADS + kv_head
        keys = _operand(_columns(k_cache, token * D, seen, 0, min(D, MAIN), MAIN), query.dtype)
        score = tl.dot(query, tl.trans(keys), input_precision="ieee")
        if REST:
            rest = _columns(k_cache, token * D, seen, MAIN, D - MAIN, REST)
            rest = tl.trans(_operand(rest, query.dtype))
            score = tl.dot(query_rest, rest, score, input_precision="ieee")
        score = score * scale
        if CAPPED:
            score = _capped(score, softcap) * LOG2E
        visible = seen[None, :]
        if WIDE:
            visible = visible & (at[None, :] <= position[:, None])
            if WINDOWED:
                visible = visible & (at[None, :] > position[:, None] - window)
        score = tl.where(visible, score, float("-inf"))
        now = tl.maximum(best, tl.max(score, 1))
        share = tl.exp2(best - now)
        p = tl.exp2(score - now[:, None])
        if SHARED:
            values = keys
        else:
            values = _columns(v_cache, token * V_STRIDE, seen, 0, DV, BLOCK_DV)
            values = _operand(values, query.dtype)
        acc = tl.dot(p.to(query.dtype), values, acc * share[:, None], input_precision="ieee")
        weight = weight * share + tl.sum(p, 1)
        best = now
    return acc, best, weight


@triton.jit(
    do_not_specialize=["n", "window", "turn", "turns", "room", "table_stride"],
    do_not_specialize_on_alignment=["page_table"],
)
def attention_pieces(
    q, k_cache, v_cache, page_table, slots, kv_lens, cu_q, plan, sinks, sums, stats, out,
    n, window, turn, turns, room, scale, softcap, v_scale, q_stride, table_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    V_STRIDE: tl.constexpr, PAGE: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Program (block of heads, p) takes the turn's items p, p + programs, ... Writes ``out`` [T, H,
    DV] for rows with one piece, else ``sums`` [units, H, DV] and ``stats`` [units, H, 2]: largest
    score (base 2) and sum of weights. The scale contains log2(e) unless scores are capped."""
    group: tl.constexpr = HEADS // KV_HEADS
    head_blocks: tl.constexpr = (group + BLOCK_HEADS - 1) // BLOCK_HEADS
    kv_head = tl.program_id(0) // head_blocks
    of_block = tl.arange(0, BLOCK_M) // BLOCK_HEADS
    of_group = tl.program_id(0) % head_blocks * BLOCK_HEADS + tl.arange(0, BLOCK_M) % BLOCK_HEADS
    head = kv_head * group + of_group
    columns = tl.arange(0, BLOCK_DV)[None, :]
    ends, item_begin, item_end = _of_turn(plan, n, 0, turn, turns, room, ROWS)
    for item in range(item_begin + tl.program_id(1), item_end, tl.num_programs(1)):
        row = tl.sum((ends <= item).to(tl.int32), 0)
        index = item - tl.load(plan + row - 1, mask=row > 0, other=0)
        size, splits = tl.load(plan + n + row), tl.load(plan + 2 * n + row)
        row_begin = tl.load(cu_q + row)
        count = tl.load(cu_q + row + 1) - row_begin
        start = tl.load(kv_lens + row) - count
        # The last block sees the most and comes first.
        block = ((count - 1) // BLOCK_Q - index // splits) * BLOCK_Q
        token = block + of_block
        there = (of_block < BLOCK_Q) & (of_group < group) & (token < count)
        first = tl.where(window > 0, tl.maximum(start + block - window + 1, 0), 0)
        low = _origin(start, window) + index % splits * size
        high = tl.minimum(low + size, start + tl.minimum(block + BLOCK_Q, count))
        low = tl.maximum(low, first // BLOCK_N * BLOCK_N)
        at = (row_begin + token).to(tl.int64) * q_stride + head * D
        query = _columns(q, at, there, 0, min(D, MAIN), MAIN)
        query_rest = _columns(q, at, there, MAIN, D - MAIN, REST) if REST else query
        acc, best, weight = _attend(
            query, query_rest, k_cache, v_cache,
            page_table + tl.load(slots + row).to(tl.int64) * table_stride,
            kv_head, low, high, first, start + token, window, scale, softcap,
            KV_HEADS, D, DV, V_STRIDE, PAGE, MAIN, REST, BLOCK_DV, BLOCK_M, BLOCK_N, WIDE,
            WINDOWED, CAPPED, SHARED,
        )  # fmt: skip
        mask = there[:, None] & (columns < DV)
        if splits == 1:
            sink = tl.load(sinks + head, mask=there, other=0.0).to(tl.float32) if SINKS else best
            to = (row_begin + token).to(tl.int64) * HEADS + head
            result = _divided(acc, best, weight, sink, v_scale, SINKS)
            tl.store(out + to[:, None] * DV + columns, result.to(out.dtype.element_ty), mask=mask)
        else:
            unit = tl.load(plan + 3 * n + row) - turn * room + token * splits + index % splits
            to = unit.to(tl.int64) * HEADS + head
            tl.store(sums + to[:, None] * DV + columns, acc, mask=mask)
            tl.store(stats + to * 2, best, mask=there)
            tl.store(stats + to * 2 + 1, weight, mask=there)


@triton.jit(do_not_specialize=["n", "turn", "turns", "room"])
def attention_merge(
    cu_q, plan, sinks, sums, stats, out, n, turn, turns, room, v_scale,
    HEADS: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr,
    ROWS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Program (p, block of columns) joins the pieces of the turn's heads of tokens p, p + programs,
    ..."""
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    number = tl.arange(0, MOST)
    ends, begin, end = _of_turn(plan, n, 4, turn, turns, room, ROWS)
    for at in range(begin * HEADS + tl.program_id(0), end * HEADS, tl.num_programs(0)):
        joined, head = at // HEADS, at % HEADS
        row = tl.sum((ends <= joined).to(tl.int32), 0)
        token = joined - tl.load(plan + 4 * n + row - 1, mask=row > 0, other=0)
        splits = tl.load(plan + 2 * n + row)
        unit = tl.load(plan + 3 * n + row) - turn * room + token * splits + number
        part = unit.to(tl.int64) * HEADS + head
        there = number < splits
        tops = tl.load(stats + part * 2, mask=there, other=LOWEST)
        masses = tl.load(stats + part * 2 + 1, mask=there, other=0.0)
        mask = there[:, None] & (columns < DV)[None, :]
        parts = tl.load(sums + part[:, None] * DV + columns[None, :], mask=mask, other=0.0)
        best = tl.max(tops, 0)
        shares = tl.exp2(tops - best)
        acc = tl.sum(parts * shares[:, None], 0)[None, :]
        weight = tl.zeros([1], tl.float32) + tl.sum(masses * shares, 0)
        sink = tl.zeros([1], tl.float32) + best
        if SINKS:
            sink = tl.zeros([1], tl.float32) + tl.load(sinks + head).to(tl.float32)
        result = _divided(acc, tl.zeros([1], tl.float32) + best, weight, sink, v_scale, SINKS)
        to = ((tl.load(cu_q + row) + token).to(tl.int64) * HEADS + head) * DV + columns[None, :]
        tl.store(out + to, result.to(out.dtype.element_ty), mask=(columns < DV)[None, :])


def multiprocessors() -> int:
    """Number of multiprocessors of the GPU; 1 if kernels are interpreted."""
    if triton.knobs.runtime.interpret:
        return 1
    driver = triton.runtime.driver.active
    return driver.utils.get_device_properties(driver.get_current_device())["multiprocessor_count"]
