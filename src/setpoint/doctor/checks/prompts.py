"""How long the prompts of a load are, as far as the lines about its prefill batches tell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from setpoint.core.moments import Moment
from setpoint.doctor.case import Case

CUT = 0.998
"""Share of its budget from which a batch ends where the budget does, in the middle of a prompt."""


def is_cut(moment: Moment, case: Case) -> bool:
    """Whether the moment's prefill batches have exactly their budget. Where nobody waits, a batch
    that nearly fills it has all that was there."""
    size = case.limits.prefill_tokens
    if not size or not moment.num_prefill:
        return False
    return moment.new_tokens >= CUT * size * moment.num_prefill


def mean_prompt(moments: Sequence[Moment], case: Case) -> float:
    """Prompt tokens of a request, with those that the cache supplied. Lines count a prompt in each
    batch that has a part of it: where a batch is cut, the next one goes on with its last prompt."""
    prefills = [moment for moment in moments if moment.num_prefill]
    seqs = sum(moment.new_seqs for moment in prefills)
    cut = [moment for moment in prefills if is_cut(moment, case)]
    if all(moment.new_seqs for moment in cut):  # some servers count new prompts alone
        seqs -= sum(moment.num_prefill for moment in cut)
    return sum(moment.new_tokens + moment.cached_tokens for moment in prefills) / max(seqs, 1)


def whole_prompts(
    moments: Sequence[Moment], case: Case, most: int
) -> Iterator[tuple[float, Moment]]:
    """Lengths of prompts: of each group of at most this many that were computed together, in one
    batch or in several that were cut, the mean length and the first line."""
    group: list[Moment] = []
    for moment in moments:
        if not moment.num_prefill:
            continue
        group.append(moment)
        if is_cut(moment, case):
            continue
        seqs = sum(each.new_seqs for each in group)
        if all(each.new_seqs for each in group):
            seqs -= len(group) - 1
        if 1 <= seqs <= most:
            tokens = sum(each.new_tokens + each.cached_tokens for each in group)
            yield tokens / seqs, group[0]
        group = []
