"""Phases of a rank's life: start-up, ramp, steady, drain, idle. A limit is judged only in the
steady phase: while a load builds up every figure is low, and when a benchmark runs out of requests
the queue is empty for a reason that is not the client's fault."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

from setpoint.core.moments import Moment
from setpoint.doctor.findings import Phase, PhaseSpan

MIN_GAP_S = 20.0
"""Silence of at least this long may be idleness; a line of 40 slow steps can take some seconds."""
GAP_FACTOR = 8
"""Idleness is longer than this many usual distances between lines."""
LEVEL = 0.8
"""A ramp ends at this share of the usual number of running requests."""
USAGE_LEVEL = 0.7
"""… and at this share of the usual usage, which follows later because outputs grow."""
DRAIN_LEVEL = 0.9
"""A drain begins when, after the last admission, fewer than this share of the requests run."""
PROBE_TOKENS = 128
"""Prompt tokens that a server's own first request, or a health check, has at most; with its
answer, it has at most twice as many."""
PROBE_STEPS = 10
"""Decode steps for each of them, if a source has nothing else."""
FEW_MOMENTS = 16
"""Fewer, as people quote them, show no ramp and no drain: there is nothing to compare them with."""
LINE_STEPS = 40
"""Decode steps that a line stands for, unless --decode-log-interval says otherwise."""


def label(moments: Sequence[Moment]) -> list[Phase]:
    """The phase of each moment. The moments are in the order of time."""
    labels: list[Phase] = ["steady"] * len(moments)
    for first, end in _busy(moments, labels):
        if len(moments) >= FEW_MOMENTS:
            _label_load(moments, first, end, labels)
    _label_start(moments, labels)
    return labels


def spans(
    moments: Sequence[Moment], labels: Sequence[Phase], ready_at: float | None = None
) -> list[PhaseSpan]:
    """The runs of equal labels; the time before the server was ready is start-up. A moment of a log
    is the line that ends it, so that silence between two loads becomes an idle span."""
    found: list[PhaseSpan] = []
    limit = _gap_limit(moments)
    for index, (moment, name) in enumerate(zip(moments, labels, strict=True)):
        end = moment.at + lasted(moment)
        if found and moment.at - found[-1].end > limit:
            found.append(PhaseSpan("idle", found[-1].end, moment.at))
        if found and found[-1].phase == name:
            found[-1] = PhaseSpan(name, found[-1].start, max(end, found[-1].end))
        else:
            start = found[-1].end if found else moment.at
            found.append(PhaseSpan(name, min(start, moment.at), end))
        if index == 0 and ready_at is not None and ready_at > moment.at:
            found[0] = PhaseSpan("start-up", moment.at, end)
    return found


def lasted(moment: Moment) -> float:
    """The seconds that a moment covers from ``at`` on; 0 for a single line, which is written at the
    end of the time that it reports."""
    is_line = moment.line > 0 and moment.num_prefill + moment.num_decode <= 1
    return 0.0 if is_line else moment.seconds


def _gap_limit(moments: Sequence[Moment]) -> float:
    gaps = [b.at - a.at - lasted(a) for a, b in itertools.pairwise(moments)]
    usual = [gap for gap in gaps if gap > 0]
    return max(MIN_GAP_S, GAP_FACTOR * statistics.median(usual)) if usual else MIN_GAP_S


def _is_idle(moment: Moment) -> bool:
    """Whether nothing ran and nothing waited. A moment that shows neither is not idle."""
    worked = moment.num_prefill or moment.num_decode or moment.new_tokens or moment.retractions
    known = moment.running is not None or moment.queue is not None
    nothing = not moment.running and not moment.queue and not moment.preparing
    return known and nothing and not worked


def _busy(moments: Sequence[Moment], labels: list[Phase]) -> list[tuple[int, int]]:
    """The runs of moments with work, as [first, end). Labels the idle ones."""
    found: list[tuple[int, int]] = []
    limit = _gap_limit(moments)
    first: int | None = None
    for index, moment in enumerate(moments):
        idle = _is_idle(moment)
        if idle:
            labels[index] = "idle"
        before = moments[index - 1] if index else moment
        if first is not None and (idle or moment.at - before.at - lasted(before) > limit):
            found.append((first, index))
            first = None
        if first is None and not idle:
            first = index
    if first is not None:
        found.append((first, len(moments)))
    return found


def waits(moment: Moment) -> bool:
    """Whether requests wait: in most of a moment that has several batches."""
    return (moment.queue or 0.0) >= 0.5


def running_of(moment: Moment) -> float | None:
    """The running requests, with those that this moment's prefill admits, which a line about a
    prefill does not count."""
    if moment.running is None:
        return None
    return moment.running + (moment.new_seqs if not moment.num_decode else 0)


def _label_load(moments: Sequence[Moment], first: int, end: int, labels: list[Phase]) -> None:
    drain = _drain_start(moments, first, end)
    steady = range(first, drain)
    decoding = [moments[i] for i in steady if moments[i].num_decode]
    level = _median([running_of(moment) for moment in decoding])
    usage = _median([moment.usage for moment in decoding])
    ramp = first
    while ramp < drain and not _at_level(moments[ramp], level, usage):
        ramp += 1
    if ramp == drain:  # no line ever shows the usual level: judge what there is
        ramp = first
    labels[first:ramp] = ["ramp"] * (ramp - first)
    labels[drain:end] = ["drain"] * (end - drain)


def _median(values: list[float | None]) -> float:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else 0.0


def _at_level(moment: Moment, level: float, usage: float) -> bool:
    running = running_of(moment)
    if running is None:
        return True
    if moment.usage is not None and moment.usage < USAGE_LEVEL * usage:
        return False
    return running >= LEVEL * level


def _drain_start(moments: Sequence[Moment], first: int, end: int) -> int:
    """Index of the first moment after the last admission at which clearly fewer requests run than
    then; ``end`` if there is no such."""
    last = first
    for index in range(first, end):
        if moments[index].num_prefill or waits(moments[index]):
            last = index
    after = [index for index in range(last, end) if moments[index].num_decode]
    peak = max((moments[index].running or 0.0 for index in after), default=0.0)
    if peak < 2:
        return end
    # Nothing comes back to the level of the last admission once a drain has begun.
    start = end
    for index in reversed(after[1:]):
        if (moments[index].running or 0.0) >= DRAIN_LEVEL * peak:
            break
        start = index
    return start


def _is_probe(moment: Moment) -> bool:
    """A short request that runs alone: from the server itself, a benchmark that begins, or a health
    check."""
    alone = (running_of(moment) or 0.0) <= 1 and not waits(moment) and moment.new_seqs <= 1
    tokens = moment.tokens or 0.0 if moment.num_decode else 0.0
    is_short = tokens <= 2 * PROBE_TOKENS
    return alone and is_short and moment.new_tokens + moment.cached_tokens <= PROBE_TOKENS


def _label_start(moments: Sequence[Moment], labels: list[Phase]) -> None:
    """Label probes as start-up, because they are not load: those before a larger load begins, and
    all if there is nothing else."""
    level = max((running_of(moment) or 0.0 for moment in moments), default=0.0)
    steps = sum(moment.num_decode * (LINE_STEPS if moment.line else 1) for moment in moments)
    few = steps < PROBE_STEPS * sum(moment.num_prefill for moment in moments)
    if few and all(_is_probe(moment) for moment in moments):
        labels[:] = ["idle"] * len(labels)
        return
    for index, moment in enumerate(moments):
        if not _is_probe(moment) or (level <= 1 and not moment.num_prefill):
            return
        if labels[index] != "idle":
            labels[index] = "start-up"
