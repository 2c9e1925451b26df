"""Finds the prefill batches that contain only one long prompt, for prefill-budget and
long-prompt-blocking."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from setpoint.core.moments import Moment
from setpoint.doctor.binding_limit import at_budget
from setpoint.doctor.case import Case
from setpoint.doctor.checks.prompts import mean_prompt
from setpoint.doctor.load import Load, Test
from setpoint.doctor.phases import waits

ONE_PROMPT = 1.3
"""Most sequences of such a batch, as the mean of the batches of a moment."""
MIN_CHUNKS = 3
"""Full chunks of one prompt in a row, while others wait."""
LONGER = 2.5
"""A long prompt has at least so many times the tokens of the usual one."""
STALLED = 2.0
"""Least number of running requests that a prefill holds up."""


def chunks_of_one(case: Case) -> tuple[Load, float]:
    """The prefill batches under load that belong to a row of full chunks of one prompt while
    other requests wait, and the prompt tokens of the longest row. A line in the middle of a long
    prompt has one sequence (or none, where only new ones count) and the whole budget. Rows of
    prompts that are hardly longer than the others do not count: each of those blocks the next, and
    none is the long one."""
    return _held_up(case, waits)


def stalling_chunks(case: Case) -> tuple[Load, float]:
    """The same, while nobody waits, but running requests cannot go on: prefill goes first."""
    return _held_up(case, lambda moment: (moment.running or 0.0) >= STALLED)


def _held_up(case: Case, holds_up: Test) -> tuple[Load, float]:
    rows = [
        row
        for load in case.loads.values()
        for row in _rows(load, case)
        if sum(moment.num_prefill for moment in row if holds_up(moment)) >= MIN_CHUNKS
    ]
    usual = mean_prompt(case.load.moments, case)
    if not rows or statistics.median(map(_tokens, rows)) < LONGER * usual:
        return case.load.where(lambda moment: False), 0.0
    kept = {id(moment) for row in rows for moment in row if holds_up(moment)}
    return case.load.where(lambda moment: id(moment) in kept), max(map(_tokens, rows))


def _rows(load: Load, case: Case) -> Iterator[list[Moment]]:
    """Prefill batches that follow one another, each with a full chunk of one prompt. Its chunks
    have the same size to the token; prompts of nearly that size have not."""
    row: list[Moment] = []
    for moment in load.moments:
        if not moment.num_prefill:
            continue
        is_chunk = is_full_chunk(moment, case)
        if row and not (is_chunk and _size(moment) == _size(row[-1])):
            yield row
            row = []
        if is_chunk:
            row.append(moment)
    if row:
        yield row


def is_full_chunk(moment: Moment, case: Case) -> bool:
    """Whether one prompt alone fills the moment's prefill batches."""
    return at_budget(moment, case.limits) and moment.new_seqs <= ONE_PROMPT * moment.num_prefill


def _size(moment: Moment) -> float:
    """Tokens of its prefill batches, in the mean."""
    return round(moment.new_tokens / moment.num_prefill)


def _tokens(row: list[Moment]) -> float:
    return float(sum(moment.new_tokens for moment in row))
