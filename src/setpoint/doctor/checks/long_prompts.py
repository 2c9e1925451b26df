"""Which prefill batches carry one long prompt alone: shared by prefill-budget and
long-prompt-blocking."""

from __future__ import annotations

from setpoint.core.moments import Moment
from setpoint.doctor.case import Case
from setpoint.doctor.limits import at_budget
from setpoint.doctor.load import Load, Test
from setpoint.doctor.phases import waits

ONE_PROMPT = 1.3
"""Sequences of a batch, at most, in the mean of those that a moment sums up."""
MIN_CHUNKS = 3
"""Full chunks of one prompt in a row, while others wait."""
STALLED = 2.0
"""Running requests that a prefill holds up, at least."""


def chunks_of_one(case: Case) -> tuple[Load, float]:
    """The prefill batches under load that belong to a row of full chunks of one prompt while
    other requests wait, and the prompt tokens of the longest row. A line in the middle of a long
    prompt has one sequence (or none, where only new ones count) and the whole budget."""
    return _rows(case, waits)


def stalling_chunks(case: Case) -> tuple[Load, float]:
    """The same, while nobody waits, but running requests cannot go on: prefill goes first."""
    return _rows(case, lambda moment: (moment.running or 0.0) >= STALLED)


def _rows(case: Case, holds_up: Test) -> tuple[Load, float]:
    kept: set[int] = set()
    longest = 0.0
    for load in case.loads.values():
        row: list[Moment] = []
        for moment in load.moments:
            if not moment.num_prefill:
                continue
            if _is_full_chunk(moment, case) and holds_up(moment):
                row.append(moment)
                continue
            longest = max(longest, _keep(row, kept))
            row = []
        longest = max(longest, _keep(row, kept))
    return case.load.where(lambda moment: id(moment) in kept), longest


def _is_full_chunk(moment: Moment, case: Case) -> bool:
    return at_budget(moment, case.limits) and moment.new_seqs <= ONE_PROMPT * moment.num_prefill


def _keep(row: list[Moment], kept: set[int]) -> float:
    """Whether this row of chunks is one prompt; its tokens if so, else 0."""
    if sum(moment.num_prefill for moment in row) < MIN_CHUNKS:
        return 0.0
    kept.update(id(moment) for moment in row)
    return float(sum(moment.new_tokens for moment in row))
