"""Finds how the hit rate of the prefix cache changes in the course of a source."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from setpoint.core.moments import Moment
from setpoint.doctor.binding_limit import at_budget
from setpoint.doctor.case import Case
from setpoint.doctor.checks.common import events
from setpoint.doctor.checks.prompts import mean_prompt
from setpoint.doctor.observations import Rank

LEAST_BEFORE = 0.35
MOST_AFTER = 0.25
LEFT = 0.45
"""A collapse leaves at most this share of the hit rate."""
MIN_SIDE = 4
"""Least number of prefill batches before and after …"""
MIN_PART = 0.1
"""… and least share of all of them on each side."""
MANY = 10
"""Fewer batches are an excerpt, as people quote them, in which …"""
CLEAR_SIDE, CLEAR_BEFORE = 3, 0.7
"""… so many batches on each side are enough, if the cache supplied at least this share before."""
PURE = 0.7
"""Least share of the batches of each side that are on that side of the middle between the two
rates."""
ALIKE = 2.5
"""Largest factor between the lengths of prompts before and after: much longer prompts are other
prompts, which were not in the cache before either."""
MIN_PROMPT = 64
"""Prompts with fewer tokens are probes."""


@dataclass(slots=True, frozen=True)
class Collapse:
    """The prefix cache supplied ``before`` of the prompt tokens, and later ``after``."""

    before: float
    after: float
    early: Sequence[Moment]
    late: Sequence[Moment]


def collapse_of(case: Case) -> Collapse | None:
    """The collapse of the rank whose hit rate fell most; None if none collapsed."""
    found = [each for rank in case.ranks if (each := _collapse(case, rank)) is not None]
    return max(found, key=lambda each: each.before - each.after, default=None)


def hit_rate(moments: Sequence[Moment]) -> float:
    """The share of the prompt tokens that the cache supplied."""
    cached = sum(moment.cached_tokens for moment in moments)
    total = cached + sum(moment.new_tokens for moment in moments)
    return cached / total if total else 0.0


def _collapse(case: Case, rank: Rank) -> Collapse | None:
    batches = [moment for moment in rank.moments if _shows_prefixes(case, moment)]
    cut = _cut([hit_rate([moment]) for moment in batches])
    if cut is None:
        return None
    early, late = batches[:cut], batches[cut:]
    before, after = hit_rate(early), hit_rate(late)
    is_short = len(batches) < MANY
    least = CLEAR_BEFORE if is_short else LEAST_BEFORE
    if before < least or after > min(MOST_AFTER, LEFT * before):
        return None
    middle = (before + after) / 2
    end = late if is_short else late[-max(len(late) // 4, MIN_SIDE // 2) :]
    sides = (
        _share(hit_rate([moment]) >= middle for moment in early),
        _share(hit_rate([moment]) < middle for moment in late),
        _share(hit_rate([moment]) < middle for moment in end),
    )
    if min(sides) < PURE or _was_flushed(case, early, late):
        return None
    lengths = [mean_prompt(_between(rank, part), case) for part in (early, late)]
    if max(lengths) > ALIKE * min(lengths):
        return None
    return Collapse(before, after, early, late)


def _shows_prefixes(case: Case, moment: Moment) -> bool:
    """Whether the moment admits requests: the later chunks of a long prompt find nothing by
    design."""
    if not moment.num_prefill or not moment.new_seqs:
        return False
    total = moment.new_tokens + moment.cached_tokens
    if total < MIN_PROMPT * moment.new_seqs:
        return False
    return not (
        moment.new_seqs <= moment.num_prefill
        and moment.cached_tokens == 0
        and at_budget(moment, case.limits)
    )


def _cut(rates: Sequence[float]) -> int | None:
    """The place at which the mean falls most clearly: that of the greatest standardized
    difference."""
    count = len(rates)
    side = max(CLEAR_SIDE if count < MANY else MIN_SIDE, round(MIN_PART * count))
    if count < 2 * side:
        return None
    total, sum_before = sum(rates), 0.0
    best, where = 0.0, None
    for index in range(1, count):
        sum_before += rates[index - 1]
        if index < side or count - index < side:
            continue
        fall = sum_before / index - (total - sum_before) / (count - index)
        weight = fall * (index * (count - index) / count) ** 0.5
        if weight > best:
            best, where = weight, index
    return where


def _share(holds: Iterable[bool]) -> float:
    found = list(holds)
    return sum(found) / len(found)


def _between(rank: Rank, part: Sequence[Moment]) -> list[Moment]:
    """All moments from the first to the last of these: parts of prompts, too."""
    return [moment for moment in rank.moments if part[0].at <= moment.at <= part[-1].at]


def _was_flushed(case: Case, early: Sequence[Moment], late: Sequence[Moment]) -> bool:
    """Whether the cache was emptied on purpose around that place."""
    around = len(late) // 4
    return any(
        early[-1 - min(around, len(early) - 1)].line < event.line < late[around].line
        for event in events(case, "flushed")
    )
