"""Sampling: changes of logits, thresholds of top-k and top-p, and draws.

A row is cut by its vocabulary alone, and what is summed in no fixed order is summed in integers, so
its token does not depend on the other rows. Nothing is sorted: tokens that can be below a threshold
in no case are left out first, in many programs; then one program for each row finds the threshold
three bits at a time, and the token in the same way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from setpoint.engine.kernels.device_sampling import DeviceMasks, DeviceRows, Draws
from setpoint.engine.kernels.triton.tiles import SEPARATE, blocks, width

TILE, GROUP = 1024, 4
"""Logits of a tile, whose sum of weights is kept, and tiles of a program that weighs."""
EDITED, HISTORY = 2048, 1024
"""Logits of a program that edits, and known tokens that it counts at a time."""
COLLECTED = 4096
"""Logits of a program that collects candidates."""
CAPACITY = 8192
"""Most candidates of a row that are collected. A row with more of them, whose distribution is
nearly flat, is read as a whole at every step."""
CANDIDATES = 1024
"""Candidates that the program of a row reads at a time."""

WORDS = tl.constexpr(16)
"""Words of a row of parameters (``sampling.columns.SLOT_DTYPE``); where its fields are follows."""
LENGTH, NUM_PROMPT, SEED, TEMPERATURE, TOP_K, TOP_P, MIN_P = map(
    tl.constexpr, (0, 1, 2, 4, 5, 6, 7)
)
FREQUENCY, PRESENCE, REPETITION, MIN_NEW, FLAGS = map(tl.constexpr, (8, 9, 10, 11, 14))
GREEDY, TRUNCATED, PENALISED = map(tl.constexpr, (0, 8, 16))
"""Bits of FLAGS."""

UNIT, MOST_TOKENS = tl.constexpr(2.0**44), (1 << 19) - 1
"""Weights as integers: the largest weight of a row, of which as many as there may be tokens fit
into 63 bits."""
NO_LIMIT, NO_END = tl.constexpr((1 << 63) - 1), tl.constexpr((1 << 31) - 1)
COARSE = tl.constexpr(12)
"""Bits that are not sought of a threshold that need not be exact."""
SLACK = tl.constexpr(1e-6)
"""How much the sum of a row's weights, relative to it, may be wrong."""


@triton.jit
def _real(parameters, field: tl.constexpr):
    """A field of a row of parameters that is in fp32."""
    return tl.load(parameters + field).to(tl.float32, bitcast=True)


@triton.jit
def _flag(parameters, bit: tl.constexpr):
    return ((tl.load(parameters + FLAGS) >> bit) & 1) != 0


@triton.jit
def _counts(known, begin, end, first, SIZE: tl.constexpr, STEP: tl.constexpr):
    """How often each of the tokens [first, first + SIZE) is among known[begin:end]."""
    counts = tl.zeros([SIZE], tl.int32)
    for at in range(begin, end, STEP):
        index = at + tl.arange(0, STEP)
        token = tl.load(known + index, mask=index < end, other=-1) - first
        counts += tl.histogram(token, SIZE, mask=(index < end) & (token >= 0) & (token < SIZE))
    return counts


@triton.jit
def _penalised(values, parameters, known, first, SIZE: tl.constexpr, STEP: tl.constexpr):
    length, num_prompt = tl.load(parameters + LENGTH), tl.load(parameters + NUM_PROMPT)
    outputs = _counts(known, num_prompt, length, first, SIZE, STEP)
    presence = tl.where(outputs > 0, _real(parameters, PRESENCE), 0.0)
    values -= outputs.to(tl.float32) * _real(parameters, FREQUENCY) + presence
    repetition = _real(parameters, REPETITION)
    if repetition != 1:
        seen = (outputs + _counts(known, 0, num_prompt, first, SIZE, STEP)) > 0
        repeated = tl.where(values > 0, tl.div_rn(values, repetition), values * repetition)
        values = tl.where(seen, repeated, values)
    return values


@triton.jit(
    do_not_specialize=["words_stride"],
    do_not_specialize_on_alignment=[
        "parameters",
        "places",
        "ends",
        "tokens",
        "biases",
        "of_row",
        "words",
    ],
)
def edit_rows(
    logits,  # [S, columns], rows ``stride`` apart
    out,  # [S, columns] fp32, or ``logits``
    parameters,  # [S, WORDS] int32
    places,  # [S] int32
    known,  # flat table of ids
    ends,  # as in TokenEntries, as are the next two
    tokens,
    biases,
    of_row,  # as in DeviceMasks, as is the next
    words,
    columns,
    stride,
    words_stride,
    IN_PLACE: tl.constexpr,
    ENTRIES: tl.constexpr,  # whether there are any
    MASKS: tl.constexpr,
    SIZE: tl.constexpr,
    STEP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * SIZE
    column = first + tl.arange(0, SIZE)
    inside = column < columns
    mask = -1
    if MASKS:
        mask = tl.load(of_row + row)
    if IN_PLACE and mask < 0:
        return
    parameters += row * WORDS
    values = tl.load(logits + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    if not IN_PLACE and _flag(parameters, PENALISED):
        # Minus infinity, which the entries set, stays what it is under penalties.
        before = known + tl.load(places + row).to(tl.int64) - tl.load(parameters + LENGTH)
        values = _penalised(values, parameters, before, first, SIZE, STEP)
    if ENTRIES:
        middle = tl.load(ends + 2 * row + 1)
        for index in range(tl.load(ends + 2 * row), middle):
            values = tl.where(column == tl.load(tokens + index), float("-inf"), values)
    if MASKS and mask >= 0:
        at = words + mask.to(tl.int64) * words_stride + column // 32
        word = tl.load(at, mask=inside, other=0)
        values = tl.where((word << (31 - column % 32)) < 0, values, float("-inf"))
    if ENTRIES:
        for index in range(middle, tl.load(ends + 2 * row + 2)):
            bias = tl.where(column == tl.load(tokens + index), tl.load(biases + index), 0.0)
            values += bias
    width = stride if IN_PLACE else columns
    tl.store(out + row * width + column, values.to(out.dtype.element_ty), mask=inside)


def edit(
    logits: torch.Tensor, rows: DeviceRows, masks: DeviceMasks | None, *, in_place: bool
) -> torch.Tensor:
    """See ``SamplingKernels.edit``."""
    assert logits.stride(1) == 1
    num_rows, columns = logits.shape
    out = (
        logits if in_place else torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    )
    entries = rows.entries
    has_entries = entries is not None and not in_place
    edit_rows[(num_rows, blocks(columns, EDITED))](
        logits, out, rows.parameters, rows.places, rows.known,
        *((entries.ends, entries.tokens, entries.values) if has_entries else (None,) * 3),
        *((None, None) if masks is None else (masks.of_row, masks.words)),
        columns, logits.stride(0), 0 if masks is None else masks.words.stride(0),
        in_place, has_entries, masks is not None, EDITED, HISTORY, num_warps=8, **SEPARATE,
    )  # fmt: skip
    return out


@triton.jit
def _weights(values, base, temperature):
    """exp((values - base) / temperature); 0 for a value of minus infinity, whatever the base."""
    base = tl.where(base > float("-inf"), base, 0.0)
    return tl.exp((values - base) / temperature)


@triton.jit
def _integer(weights):
    return (weights * UNIT).to(tl.int64)


@triton.jit(do_not_specialize_on_alignment=["parameters"])
def weigh_tiles(
    logits,  # [S, columns], rows ``stride`` apart
    parameters,  # [S, WORDS] int32
    tops,  # [S, tiles] fp32, out: the largest logit of each tile
    sums,  # [S, tiles] fp32, out: its sum of weights, of which the largest is 1
    counts,  # [S] int32, out: 0
    columns,
    stride,
    tiles,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    DRAWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    column = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    values = tl.load(logits + row * stride + column, mask=column < columns, other=float("-inf")).to(
        tl.float32
    )
    # No token is chosen from a row with a NaN, as from one with an infinity.
    values = tl.where(values != values, float("inf"), values)
    top = tl.max(values, 1)
    tl.store(tops + row * tiles + tile, top, mask=tile < tiles)
    if DRAWS > 0:
        temperature = _real(parameters + row * WORDS, TEMPERATURE)
        weights = _weights(values, top[:, None], temperature)
        tl.store(sums + row * tiles + tile, tl.sum(weights, 1), mask=tile < tiles)
    if DRAWS > 1:
        tl.store(counts + row, 0, mask=tl.program_id(1) == 0)


@triton.jit
def _shares(tops, sums, top, temperature):
    """The sum of weights of each tile, as integers."""
    return _integer(sums * _weights(tops, top, temperature))


@triton.jit
def _is_cut(parameters):
    """Whether some of the row's tokens cannot be drawn."""
    cuts = _flag(parameters, TRUNCATED) | (_real(parameters, MIN_P) > 0)
    return cuts & (_flag(parameters, GREEDY) == 0)


@triton.jit
def _is_sequential(parameters, columns):
    """Whether top-p is measured on what top-k leaves, which min-p demands."""
    return (
        (_real(parameters, MIN_P) > 0)
        & (_real(parameters, TOP_P) < 1)
        & (tl.load(parameters + TOP_K) < columns)
    )


@triton.jit
def _trials(found, shift):
    """A number of which the bits from shift + 3 on are found, with each value of the next three."""
    return found | (tl.arange(0, 8) << shift)


@triton.jit
def _refined(found, reach, shift):
    """The largest of the ``_trials`` that reaches what is sought. The smallest always does."""
    reach = reach & (tl.arange(0, 8) > 0)
    return found | (tl.sum(reach.to(tl.int32), 0) << shift)


@triton.jit
def _cut(parameters, tops, total, tiles, columns):
    """A weight below which no token can be left. tops: weights of the largest token of each tile.
    total: the sum of all weights, in units of UNIT."""
    top_k, top_p, min_p = (
        tl.load(parameters + TOP_K),
        _real(parameters, TOP_P),
        _real(parameters, MIN_P),
    )
    # The largest tokens of k tiles are k tokens.
    by_k = 0
    if top_k <= tiles:
        keys = tops.to(tl.int32, bitcast=True)
        shift = 27
        while shift > COARSE:
            trials = _trials(by_k, shift)
            reach = tl.sum((keys[None, :] >= trials[:, None]).to(tl.int32), 1) >= top_k
            by_k = _refined(by_k, reach, shift)
            shift -= 3
    # Tokens of this weight and less, if all were, would be less than what top-p leaves out.
    rest = tl.maximum(1.0 - top_p - SLACK, 0.0) * (total / columns)
    cut = tl.where(_is_sequential(parameters, columns), 0.0, tl.maximum(rest, min_p))
    return tl.maximum(cut, by_k.to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize_on_alignment=["parameters"])
def collect_candidates(
    logits,  # [S, columns], rows ``stride`` apart
    parameters,  # [S, WORDS] int32
    tops,  # [S, tiles] fp32
    sums,  # [S, tiles] fp32
    counts,  # [S] int32, in and out
    tokens,  # [S, CAPACITY] int32, out, in any order
    weights,  # [S, CAPACITY] fp32, out: their weights
    columns,
    stride,
    tiles,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,  # at least ``tiles``
    SIZE: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    parameters += row * WORDS
    if _is_cut(parameters) == 0:
        return
    tile = tl.arange(0, WIDTH)
    largest = tl.load(tops + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
    top = tl.max(largest, 0)
    if (tl.abs(top) < float("inf")) == 0:
        return
    temperature = _real(parameters, TEMPERATURE)
    part = tl.load(sums + row * tiles + tile, mask=tile < tiles, other=0.0)
    total = tl.sum(_shares(largest, part, top, temperature), 0).to(tl.float32) / UNIT
    largest = _weights(largest, top, temperature)
    cut = _cut(parameters, largest, total, tiles, columns)
    first = tl.program_id(1) * SIZE
    own = (tile >= first // TILE) & (tile < (first + SIZE) // TILE)
    if tl.max(tl.where(own, largest, 0.0), 0) < cut:
        return
    column = first + tl.arange(0, SIZE)
    inside = column < columns
    values = tl.load(logits + row * stride + column, mask=inside, other=float("-inf"))
    weight = _weights(values.to(tl.float32), top, temperature)
    chosen = inside & (weight >= cut) & (weight > 0)
    number = tl.cumsum(chosen.to(tl.int32), 0)
    base = tl.atomic_add(counts + row, tl.max(number, 0), sem="relaxed")
    at = base + number - 1
    chosen = chosen & (at < CAPACITY)
    tl.store(tokens + row * CAPACITY + at, column, mask=chosen)
    tl.store(weights + row * CAPACITY + at, weight, mask=chosen)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(parameters):
    """The row's number in [0, 1), in float64 with the bits of ``sampling.random.uniform``."""
    low, high = tl.load(parameters + SEED), tl.load(parameters + SEED + 1)
    seed = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
    position = tl.load(parameters + LENGTH).to(tl.int64).to(tl.uint64, bitcast=True)
    golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    bits = _mix(_mix(seed.to(tl.uint64, bitcast=True) + golden) + position * golden) >> 11
    return bits.to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _share(number, total):
    """floor(number · total), at most total - 1. total: int64, positive."""
    return tl.minimum((number * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def _best(logits, largest, top, columns, TILE: tl.constexpr):
    """The first token with the row's largest logit ``top``."""
    tile = tl.arange(0, largest.shape[0])
    own = tl.min(tl.where(largest == top, tile, largest.shape[0]), 0)
    column = own * TILE + tl.arange(0, TILE)
    values = tl.load(logits + column, mask=column < columns, other=float("-inf")).to(tl.float32)
    return tl.min(tl.where(values == top, column, columns), 0)


@triton.jit
def _drawn_of_whole(logits, parameters, shares, temperature, columns, TILE: tl.constexpr):
    """The token at the row's number in the distribution of all tokens. shares: sums of the weights
    of each tile."""
    tile = tl.arange(0, shares.shape[0])
    target = _share(_uniform(parameters), tl.sum(shares, 0))
    own = tl.sum((tl.cumsum(shares, 0) <= target).to(tl.int32), 0)
    before = tl.sum(tl.where(tile < own, shares, 0), 0)
    share = tl.sum(tl.where(tile == own, shares, 0), 0)
    # The weights of the tile's tokens are measured by the largest of them, so that they are not
    # rounded to nothing. Their sum is the tile's share in other units.
    column = own * TILE + tl.arange(0, TILE)
    values = tl.load(logits + column, mask=column < columns, other=float("-inf")).to(tl.float32)
    ends = tl.cumsum(_integer(_weights(values, tl.max(values, 0), temperature)), 0)
    number = (target - before).to(tl.float32) / share.to(tl.float32)
    return own * TILE + tl.sum((ends <= _share(number, tl.max(ends, 0))).to(tl.int32), 0)


@triton.jit
def _read(candidates, size, begin, CAPACITY: tl.constexpr, STEP: tl.constexpr):
    """Candidates [begin, begin + STEP): their tokens, and the bits of their weights, which have the
    order of the weights; -1 after the last. More candidates than CAPACITY are all tokens."""
    logits, top, temperature, count, tokens, weights, _ = candidates
    index = begin + tl.arange(0, STEP)
    inside = index < size
    if count > CAPACITY:
        token = index
        values = tl.load(logits + index, mask=inside, other=float("-inf")).to(tl.float32)
        weight = _weights(values, top, temperature)
    else:
        token = tl.load(tokens + index, mask=inside, other=0)
        weight = tl.load(weights + index, mask=inside, other=0.0)
    return token, tl.where(inside, weight.to(tl.int32, bitcast=True), -1)


@triton.jit
def _sums(below_zero, key):
    """Number, and sum of weights, of the candidates of each trial for which ``below_zero`` [trials,
    STEP] is that."""
    weight = _integer(tl.maximum(key, 0).to(tl.float32, bitcast=True))
    # Blocks of conditions would be stored in memory.
    chosen = below_zero >> 31
    return -tl.sum(chosen, 1), tl.sum(chosen.to(tl.int64) & weight[None, :], 1)


@triton.jit
def _above(candidates, trials, CAPACITY: tl.constexpr, STEP: tl.constexpr):
    """Number, and sum of weights, of the candidates whose weights have at least the bits of each
    trial."""
    numbers, masses = tl.zeros(trials.shape, tl.int32), tl.zeros(trials.shape, tl.int64)
    size = tl.where(candidates[3] > CAPACITY, candidates[6], candidates[3])
    for begin in range(0, size, STEP):
        _, key = _read(candidates, size, begin, CAPACITY, STEP)
        number, mass = _sums(trials[:, None] - 1 - key[None, :], key)
        numbers += number
        masses += mass
    return numbers, masses


@triton.jit
def _before(candidates, border, trials, CAPACITY: tl.constexpr, STEP: tl.constexpr):
    """The sum of weights of the candidates whose weights have at least the bits ``border``, before
    the token of each trial."""
    masses = tl.zeros(trials.shape, tl.int64)
    size = tl.where(candidates[3] > CAPACITY, candidates[6], candidates[3])
    for begin in range(0, size, STEP):
        token, key = _read(candidates, size, begin, CAPACITY, STEP)
        key = tl.where(key >= border, key, 0)
        _, mass = _sums(token[None, :] - trials[:, None], key)
        masses += mass
    return masses


@triton.jit
def _border(candidates, top_k, nucleus, CAPACITY: tl.constexpr, STEP: tl.constexpr):
    """The bits of the weight of the last token that top-k and top-p leave: the largest weight that
    ``top_k`` tokens reach, or that tokens with the sum ``nucleus`` reach."""
    border, shift = 0, 27
    while shift >= 0:
        numbers, masses = _above(candidates, _trials(border, shift), CAPACITY, STEP)
        border = _refined(border, (numbers >= top_k) | (masses >= nucleus), shift)
        shift -= 3
    return border


@triton.jit
def _drawn_of_rest(
    candidates, parameters, total, BITS: tl.constexpr, CAPACITY: tl.constexpr, STEP: tl.constexpr
):
    """The token at the row's number among those that top-k, top-p and min-p leave. total: the sum
    of all weights."""
    columns = candidates[6]
    top_k, top_p = tl.load(parameters + TOP_K), _real(parameters, TOP_P).to(tl.float64)
    nucleus = tl.where(top_p < 1, (top_p * total.to(tl.float64)).to(tl.int64), NO_LIMIT)
    if _is_sequential(parameters, columns):
        by_k = _border(candidates, top_k, NO_LIMIT, CAPACITY, STEP)
        above = tl.full([1], 0, tl.int32) + (by_k + 1)
        numbers, masses = _above(candidates, above, CAPACITY, STEP)
        mass = tl.sum(masses + (top_k - numbers) * _integer(by_k.to(tl.float32, bitcast=True)), 0)
        nucleus = (top_p * mass.to(tl.float64)).to(tl.int64)
    border = _border(candidates, top_k, nucleus, CAPACITY, STEP)
    border = tl.maximum(border, _real(parameters, MIN_P).to(tl.int32, bitcast=True))
    all_tokens = tl.full([1], NO_END, tl.int32)
    left = tl.sum(_before(candidates, border, all_tokens, CAPACITY, STEP), 0)
    target = _share(_uniform(parameters), left)
    # The token is the largest number before which there is not more than the target.
    drawn, shift = 0, BITS - 3
    while shift >= 0:
        before = _before(candidates, border, _trials(drawn, shift), CAPACITY, STEP)
        drawn = _refined(drawn, before <= target, shift)
        shift -= 3
    return drawn


@triton.jit(do_not_specialize_on_alignment=["parameters", "places"])
def choose_tokens(
    logits,  # [S, columns], rows ``stride`` apart
    parameters,  # [S, WORDS] int32
    places,  # [S] int32
    known,  # flat table of ids, in and out
    out,  # [S] int64, out
    tops,  # [S, tiles] fp32
    sums,  # [S, tiles] fp32
    counts,  # [S] int32
    tokens,  # [S, CAPACITY] int32
    weights,  # [S, CAPACITY] fp32
    columns,
    stride,
    tiles,
    DRAWS: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,  # a multiple of 3 that a token fits into
    CAPACITY: tl.constexpr,
    STEP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    parameters += row * WORDS
    tile = tl.arange(0, WIDTH)
    largest = tl.load(tops + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
    top = tl.max(largest, 0)
    chosen = -1
    if tl.abs(top) < float("inf"):
        if DRAWS == 0 or _flag(parameters, GREEDY):
            chosen = _best(logits, largest, top, columns, TILE)
        else:
            temperature = _real(parameters, TEMPERATURE)
            part = tl.load(sums + row * tiles + tile, mask=tile < tiles, other=0.0)
            shares = _shares(largest, part, top, temperature)
            if DRAWS == 1:
                chosen = _drawn_of_whole(logits, parameters, shares, temperature, columns, TILE)
            elif _is_cut(parameters):
                candidates = (
                    logits, top, temperature, tl.load(counts + row), tokens + row * CAPACITY,
                    weights + row * CAPACITY, columns,
                )  # fmt: skip
                chosen = _drawn_of_rest(
                    candidates, parameters, tl.sum(shares, 0), BITS, CAPACITY, STEP
                )
            else:
                chosen = _drawn_of_whole(logits, parameters, shares, temperature, columns, TILE)
    tl.store(out + row, chosen.to(tl.int64))
    tl.store(known + tl.load(places + row), tl.maximum(chosen, 0))


def choose(logits: torch.Tensor, rows: DeviceRows, draws: Draws) -> torch.Tensor:
    """See ``SamplingKernels.choose``."""
    (num_rows, columns), device = logits.shape, logits.device
    assert logits.stride(1) == 1
    assert columns <= MOST_TOKENS
    tiles = blocks(columns, TILE)
    tops, sums = (torch.empty((num_rows, tiles), dtype=torch.float32, device=device) for _ in "12")
    counts = torch.empty(num_rows, dtype=torch.int32, device=device)
    lists = CAPACITY if draws == Draws.TRUNCATED else 0
    tokens = torch.empty((num_rows, lists), dtype=torch.int32, device=device)
    weights = torch.empty((num_rows, lists), dtype=torch.float32, device=device)
    out = torch.empty(num_rows, dtype=torch.int64, device=device)
    sizes = columns, logits.stride(0), tiles
    weigh_tiles[(num_rows, blocks(tiles, GROUP))](
        logits,
        rows.parameters,
        tops,
        sums,
        counts,
        *sizes,
        TILE,
        GROUP,
        int(draws),
        num_warps=8,
        **SEPARATE,
    )
    if draws == Draws.TRUNCATED:
        collect_candidates[(num_rows, blocks(columns, COLLECTED))](
            logits, rows.parameters, tops, sums, counts, tokens, weights, *sizes,
            TILE, width(tiles), COLLECTED, CAPACITY, num_warps=8, **SEPARATE,
        )  # fmt: skip
    choose_tokens[(num_rows,)](
        logits, rows.parameters, rows.places, rows.known, out, tops, sums, counts, tokens, weights,
        *sizes, int(draws), TILE, width(tiles), 3 * blocks(columns.bit_length(), 3), CAPACITY,
        CANDIDATES, num_warps=8, **SEPARATE,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["places"])
def place_chosen(ids, places, known, num_rows, SIZE: tl.constexpr):
    row = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    token = tl.maximum(tl.load(ids + row, mask=row < num_rows, other=0), 0)
    place = tl.load(places + row, mask=row < num_rows, other=0)
    tl.store(known + place, token.to(tl.int32), mask=row < num_rows)


def place(ids: torch.Tensor, rows: DeviceRows) -> None:
    """See ``SamplingKernels.place``."""
    place_chosen[(blocks(len(ids), 256),)](
        ids, rows.places, rows.known, len(ids), 256, num_warps=2, **SEPARATE
    )
