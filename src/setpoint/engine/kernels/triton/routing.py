"""Which experts a token uses, and the sum of what they make of it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from setpoint.engine.kernels.ops import SCORINGS, Routing
from setpoint.engine.kernels.ref import LEAST_SUM
from setpoint.engine.kernels.triton.tiles import BLOCK, SEPARATE, blocks, warps, width

SUM_FLOOR = tl.constexpr(LEAST_SUM)


@triton.jit
def _largest(x):
    return tl.max(tl.max(x, 1), 0)


@triton.jit
def _scores(logits, SCORING: tl.constexpr):
    """Numbers of SCORINGS: 0 is the softmax, 2 the sigmoid, and 1 takes the logits."""
    if SCORING == 0:
        shares = tl.exp(logits - _largest(logits))
        scores = shares / tl.sum(tl.sum(shares, 1), 0)
    elif SCORING == 2:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = logits
    return scores


@triton.jit
def _open_groups(choice, exist, GROUPS: tl.constexpr, OPEN: tl.constexpr, BEST: tl.constexpr):
    """choice [G, M], with -inf in all groups but the OPEN ones with the largest sums of their BEST
    largest numbers."""
    group = tl.arange(0, choice.shape[0])
    member = tl.arange(0, choice.shape[1])[None, :]
    left = tl.where(exist, choice, float("-inf"))
    total = tl.zeros([choice.shape[0]], tl.float32)
    for _ in tl.static_range(BEST):
        best = tl.max(left, 1)
        total += best
        first = tl.min(tl.where(left == best[:, None], member, choice.shape[1]), 1)
        left = tl.where(member == first[:, None], float("-inf"), left)
    total = tl.where(total == total, total, float("inf"))
    is_free = group < GROUPS
    is_open = group < 0
    for _ in tl.static_range(OPEN):
        best = tl.max(tl.where(is_free, total, float("-inf")), 0)
        first = tl.min(tl.where(is_free & (total == best), group, GROUPS), 0)
        is_open = is_open | (group == first)
        is_free = is_free & (group != first)
    return tl.where(is_open[:, None], choice, float("-inf"))


@triton.jit
def route_tokens(
    logits,  # [T, GROUPS MEMBERS]
    correction,  # [GROUPS MEMBERS] fp32
    ids,  # [T, CHOSEN] int32, out
    weights,  # [T, CHOSEN] fp32, out
    scaling,
    GROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
    CHOSEN: tl.constexpr,
    OPEN: tl.constexpr,
    BEST: tl.constexpr,
    SCORING: tl.constexpr,
    NORMALISES: tl.constexpr,
    CORRECTS: tl.constexpr,
    GROUPS_WIDTH: tl.constexpr,
    MEMBERS_WIDTH: tl.constexpr,
    CHOSEN_WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS_WIDTH)[:, None]
    member = tl.arange(0, MEMBERS_WIDTH)[None, :]
    expert = group * MEMBERS + member
    free = (group < GROUPS) & (member < MEMBERS)
    values = tl.load(logits + token * GROUPS * MEMBERS + expert, mask=free, other=float("-inf")).to(
        tl.float32
    )
    scores = _scores(values, SCORING)
    choice = scores
    if CORRECTS:
        choice += tl.load(correction + expert, mask=free, other=0.0)
    choice = tl.where(choice == choice, choice, float("inf"))  # a NaN compares with nothing
    if GROUPS > 1:
        choice = _open_groups(choice, free, GROUPS, OPEN, BEST)
    number = tl.arange(0, CHOSEN_WIDTH)
    chosen = tl.zeros([CHOSEN_WIDTH], tl.int32)
    found = tl.full([CHOSEN_WIDTH], float("-inf") if SCORING == 1 else 0.0, tl.float32)
    for index in tl.static_range(CHOSEN):
        best = _largest(tl.where(free, choice, float("-inf")))
        candidates = tl.where(free & (choice == best), expert, GROUPS * MEMBERS)
        first = tl.min(tl.min(candidates, 1), 0)
        score = tl.sum(tl.sum(tl.where(expert == first, scores, 0.0), 1), 0)
        chosen = tl.where(number == index, first, chosen)
        found = tl.where(number == index, score, found)
        free = free & (expert != first)
    if SCORING == 1:
        shares = tl.exp(found - tl.max(found, 0))
        found = shares / tl.sum(shares, 0)
    if NORMALISES:
        found = found / (tl.sum(found, 0) + SUM_FLOOR)
    has_nan = _largest((values != values).to(tl.int32)) > 0
    found = tl.where(has_nan, float("nan"), found * scaling)
    at = token * CHOSEN + number
    tl.store(ids + at, chosen, mask=number < CHOSEN)
    tl.store(weights + at, found, mask=number < CHOSEN)


def route(
    logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``Ops.route``."""
    assert logits.is_contiguous()
    assert correction is None or correction.dtype == torch.float32
    (tokens, experts), count, groups = logits.shape, routing.num_chosen, routing.num_groups
    members = experts // groups
    ids = torch.empty((tokens, count), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, count), dtype=torch.float32, device=logits.device)
    spans = width(groups), width(members), width(count)
    route_tokens[(tokens,)](
        logits, correction, ids, weights, routing.scaling, groups, members, count,
        routing.num_open, min(routing.num_best, members), SCORINGS[routing.scoring],
        routing.normalise, correction is not None, *spans,
        num_warps=warps(spans[0] * spans[1]), **SEPARATE,
    )  # fmt: skip
    return ids, weights


@triton.jit
def combine_parts(
    parts,  # [T CHOSEN, columns]
    weights,  # [T, CHOSEN] fp32
    shared,  # [T, columns]
    gate,  # [T]
    out,  # [T, columns]
    columns,
    CHOSEN: tl.constexpr,
    SHARES: tl.constexpr,  # whether there is ``shared``
    GATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros([BLOCK], tl.float32)
    for index in tl.static_range(CHOSEN):
        pair = token * CHOSEN + index
        part = tl.load(parts + pair * columns + column, mask=inside, other=0.0).to(tl.float32)
        total += part * tl.load(weights + pair)
    if SHARES:
        common = tl.load(shared + token * columns + column, mask=inside, other=0.0).to(tl.float32)
        if GATES:
            common *= 1.0 / (1.0 + tl.exp(-tl.load(gate + token).to(tl.float32)))
        total += common
    tl.store(out + token * columns + column, total.to(out.dtype.element_ty), mask=inside)


def combine(
    parts: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``Ops.combine``."""
    given = [each for each in (parts, weights, shared, gate) if each is not None]
    assert all(each.is_contiguous() for each in given)
    assert weights.dtype == torch.float32
    (tokens, count), columns = weights.shape, parts.shape[1]
    out = torch.empty((tokens, columns), dtype=parts.dtype, device=parts.device)
    combine_parts[(tokens, blocks(columns))](
        parts, weights, shared, gate, out, columns, count, shared is not None, gate is not None,
        BLOCK, num_warps=4, **SEPARATE,
    )  # fmt: skip
    return out
