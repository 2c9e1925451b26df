"""The input of a check: the observations of one server, and figures that several checks need."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from setpoint.core.moments import Moment
from setpoint.doctor.binding_limit import (
    AT_BUDGET,
    SchedulerLimits,
    at_budget,
    binding_limit,
    is_full,
)
from setpoint.doctor.findings import Phase, PhaseSpan
from setpoint.doctor.load import Load, weigh
from setpoint.doctor.observations import Facts, Observations, Rank, SourceKind
from setpoint.doctor.phases import MIN_GAP_S, label, lasted, running_of, spans, waits

MIN_COVERAGE = 0.5
MIN_LINES = 3
"""Fewer lines do not show a lasting state."""
MIN_OF_BEGINNING = 5
MIN_SECONDS = 20.0
"""So many lines, over so many seconds, are needed if a source begins with the load."""
MIN_DECODING = 0.1
MANY_LINES = 10
"""So many lines are evidence, however short their time; fewer are an excerpt."""
AGREE = 0.75
"""Share of the lines of an excerpt that show the same limit."""
NEARLY = 0.97
PINNED = 0.7
"""Share of the moments with a queue in which the same number of requests runs, if that number is a
cap that the source does not name …"""
MOSTLY, SOMETIMES, MANY, NEAR = 0.45, 0.3, 16, 0.9
"""… or a smaller share, if nearly all others are just below it and it is not small, the smallest
if it is a round number, as people give: where memory decides, the greatest number is a rare one."""
TRADED = -0.9
"""Correlation of the running requests with the tokens in use, at most, if memory is traded …"""
MIN_TRADES = 4
"""… and the least number of decode lines that show it."""
TIGHT = 0.85
"""Usage from which the next request with its reserve may not fit."""
LINES_PER_MINUTE = 60.0
"""Batch lines of a minute, if the source has no clock: 40 decode steps take about a second."""
MIN_BUDGET = 256
"""Smaller prefill batches are not taken for full ones."""
MIN_SIZES = 5
"""Least number of prefill batches from which their budget is inferred."""
MANY_EQUAL = 6
"""If so many batches have exactly the greatest size, it is their budget, however many are
smaller."""
ROW = 5
"""If so many batches in a row have exactly the same size, it is their budget, too."""
LOADED: tuple[Phase, ...] = ("steady",)


@dataclass(slots=True, frozen=True)
class Case:
    """Frozen view of one server. Checks are pure functions of it."""

    seen: Observations
    phases: dict[str, list[PhaseSpan]] = field(default_factory=dict)
    """The phases of each rank, by its name."""
    loads: dict[str, Load] = field(default_factory=dict)
    """The steady phases of each rank, by its name."""
    load: Load = field(default_factory=Load)
    """The steady phases of all ranks, in the order of time."""
    decoding: Load = field(default_factory=Load)
    """The moments of ``load`` in which requests generated tokens. Usage and running requests are
    judged by these, because a line about a prefill shows them before its new requests have joined.
    They are all moments of ``load`` if these would be too few; more are needed if most moments of
    ``load`` have a usage."""
    limits: SchedulerLimits = field(default_factory=SchedulerLimits)
    slots_named: bool = False
    """Whether the source names the cap ``limits.slots``; otherwise it is inferred from a constant
    number of running requests."""
    retractions_per_minute: float = 0.0
    """Rate of the rank with the most retractions, over its busy time."""
    num_retractions: int = 0
    """Number of retractions of all ranks."""

    @property
    def facts(self) -> Facts:
        return self.seen.facts

    @property
    def ranks(self) -> list[Rank]:
        return self.seen.ranks

    def option(self, name: str, default: Any = None) -> Any:
        """A server option by its field name; ``default`` if the source does not show it."""
        value = self.facts.options.get(name)
        return default if value is None else value

    def number(self, name: str) -> float | None:
        """A server option that is a number, or None."""
        value = self.facts.options.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return float(value)

    @property
    def has_load(self) -> bool:
        """Whether there are enough batches under load, and enough of them understood, to judge."""
        if len(self.load) < MIN_LINES or self.seen.coverage < MIN_COVERAGE:
            return False
        if not self.is_excerpt or not self._is_beginning:
            return True
        if len(self.load) < MIN_OF_BEGINNING:
            return False
        # Two excerpts may have minutes between them, which are no time under load.
        until_last = self.load.moments[-1].at - self.load.moments[0].at
        return not 0 < self.load.seconds < MIN_SECONDS or until_last >= MIN_SECONDS

    @property
    def _is_beginning(self) -> bool:
        """Whether the source shows only the first seconds of a load that began with nothing
        running, which do not show a state yet."""
        first = self.load.moments[0]
        most = self.load.most(running_of) or 0.0
        return first.num_prefill > 0 and first.running == 0 and most > 1

    @property
    def is_excerpt(self) -> bool:
        """Whether the source has only a few lines, as people quote them. They prove something only
        if they agree, and do not show how long it lasts."""
        return len(self.load) < MANY_LINES

    @property
    def kind(self) -> SourceKind:
        return self.seen.sources[0].kind if self.seen.sources else "log"

    @property
    def span(self) -> str:
        """The size of the load in words: "5 lines (14 s)" of a log, "14 s" of other sources."""
        moments = self.load.moments
        lines = f"{len(moments):,} line{'s' * (len(moments) != 1)}"
        seconds = moments[-1].at + lasted(moments[-1]) - moments[0].at if moments else 0.0
        if self.kind != "log":
            return f"{seconds:.0f} s"
        return f"{lines} ({seconds:.0f} s)" if self.load.has_clock else lines

    @property
    def conservativeness(self) -> float:
        value = self.number("schedule_conservativeness")
        return 1.0 if value is None else value

    def queued(self, load: Load | None = None) -> Load:
        """The part of a load in which requests wait."""
        return (load or self.decoding).where(waits)

    def share_of(self, limit: str) -> float:
        """Share of the loaded time in which this limit binds."""
        return self.load.share(lambda moment: binding_limit(moment, self.limits) == limit)


def examine(seen: Observations) -> Case:
    """Make the case of these observations."""
    phases, loads = {}, {}
    clock = all(source.clock != "none" for source in seen.sources)
    for rank in seen.ranks:
        labels = label(rank.moments)
        ready = [event.at for event in rank.events if event.kind == "ready"]
        phases[rank.name] = spans(rank.moments, labels, ready[0] if ready else None)
        loads[rank.name] = _steady(rank.moments, labels, clock)
    pairs = [
        pair for load in loads.values() for pair in zip(load.moments, load.weights, strict=True)
    ]
    pairs.sort(key=lambda pair: pair[0].at)
    load = Load(tuple(m for m, _ in pairs), tuple(w for _, w in pairs), clock)
    decoding = load.where(lambda moment: moment.num_decode > 0)
    others_tell = load.share(lambda moment: moment.usage is not None) >= 0.5
    if len(decoding) < (max(MIN_LINES, MIN_DECODING * len(load)) if others_tell else MIN_LINES):
        decoding = load
    limits, named = _limits(seen.facts, load, decoding)
    reserve = seen.facts.options.get("schedule_conservativeness")
    is_lowered = isinstance(reserve, int | float) and reserve < 1
    return Case(
        seen=seen,
        phases=phases,
        loads=loads,
        load=load,
        decoding=decoding,
        limits=limits,
        slots_named=named,
        num_retractions=sum(_retractions(rank) for rank in seen.ranks),
        retractions_per_minute=max(
            (_rate(rank, clock, is_lowered) for rank in seen.ranks), default=0.0
        ),
    )


def _steady(moments: list[Moment], labels: list[Phase], clock: bool) -> Load:
    weights = weigh(moments, MIN_GAP_S)
    if not clock or not any(weights):
        weights = [1.0] * len(moments)
    kept = [i for i, name in enumerate(labels) if name in LOADED and tells(moments[i])]
    return Load(tuple(moments[i] for i in kept), tuple(weights[i] for i in kept), clock)


def tells(moment: Moment) -> bool:
    """Whether it shows a batch or a queue; a moment may hold nothing but a retraction."""
    return moment.running is not None or moment.queue is not None or moment.usage is not None


def _retractions(rank: Rank) -> int:
    counted = sum(moment.retractions for moment in rank.moments)
    return max(counted, rank.num_events.get("retraction", 0))


def _rate(rank: Rank, clock: bool, is_lowered: bool) -> float:
    """Retractions per minute of the busy time, or of its last three quarters if the rate is lower
    there: retractions that occur only at the beginning of a load no longer matter. Where an option
    has lowered the memory reserve, those that come later show that they come back: after each
    burst, the estimate of future output decays to what caused it."""
    rate = _retractions(rank) / _busy_minutes(rank, clock)
    later = replace(rank, moments=rank.moments[len(rank.moments) // 4 :], num_events={})
    if not any(moment.retractions for moment in rank.moments) or not later.moments:
        return rate
    if is_lowered and _retractions(later):
        return rate
    return min(rate, _retractions(later) / _busy_minutes(later, clock))


def _busy_minutes(rank: Rank, clock: bool) -> float:
    """The busy minutes of a rank, but at least half a minute, so that one retraction in a short log
    does not make a high rate."""
    if clock:
        minutes = sum(weigh(rank.moments, MIN_GAP_S)) / 60
    else:
        minutes = sum(max(moment.num_decode, 1) for moment in rank.moments) / LINES_PER_MINUTE
    return max(minutes, 0.5)


def _limits(facts: Facts, load: Load, decoding: Load) -> tuple[SchedulerLimits, bool]:
    slots, named = _slots(facts, load, decoding)
    tokens, whole = _prefill_tokens(facts, load)
    reasons = any(moment.refusals for moment in load.moments)
    limits = SchedulerLimits(slots, tokens, whole_prompts=whole, reasons=reasons)
    waiting = load.where(lambda moment: waits(moment) and moment.num_prefill > 0)
    full = waiting.where(lambda moment: at_budget(moment, limits))
    decodes = sum(1 for moment in load.moments if moment.num_decode and not moment.num_prefill)
    # Prefill goes before decode: where its batches are always full, few decode steps run between.
    bound = len(full) >= max(3, 0.6 * len(waiting), 0.5 * decodes)
    return replace(limits, prefill_bound=bound), named


def _slots(facts: Facts, load: Load, decoding: Load) -> tuple[float | None, bool]:
    """The cap of running requests of one rank, and whether the source names it."""
    most = decoding.most(running_of) or 0.0
    named = facts.max_running_requests
    option = facts.options.get("max_running_requests")
    if named is None and isinstance(option, int) and not isinstance(option, bool):
        parts = facts.options.get("attn_dp_size") or facts.options.get("dp_size") or 1
        divided = option // parts if isinstance(parts, int) and parts > 0 else option
        named = divided if most <= divided else option
    pipeline = facts.options.get("pp_size")
    if named and isinstance(pipeline, int) and pipeline > 1 and most <= named // pipeline:
        named //= pipeline
    if named and most <= 1.05 * named:
        return float(named), True
    pinned = _pinned(decoding)
    if pinned is None or (load.most(lambda moment: moment.running) or 0.0) > pinned:
        return None, False
    return None if _stops_below(load, pinned) else pinned, False


def _stops_below(load: Load, most: float) -> bool:
    """Whether memory, and not a cap, kept the next request out: after most of the prefill batches
    beside a nearly full pool, fewer than ``most`` requests ran, the admitted ones included,
    although others were left in the queue."""
    admitting = load.where(
        lambda moment: moment.num_prefill > 0 and waits(moment) and (moment.usage or 0.0) >= TIGHT
    )
    below = admitting.where(lambda moment: (running_of(moment) or most) < most)
    return len(below) >= MIN_LINES and len(below) > 0.5 * len(admitting)


def trades_memory(load: Load) -> bool:
    """Whether the fewer tokens are in use, the more requests run. What they use and what is
    reserved for them then add up to the same sum: the reserve decides how many run. Where a cap
    decides, or prefill, more requests use more."""
    pairs = [
        (moment.running, moment.tokens)
        for moment in load.moments
        if waits(moment) and moment.num_decode and moment.running and moment.tokens
    ]
    running, tokens = [one for one, _ in pairs], [other for _, other in pairs]
    if len(pairs) < MIN_TRADES or len(set(running)) < 3 or len(set(tokens)) < 3:
        return False
    return statistics.correlation(running, tokens) <= TRADED


def _pinned(decoding: Load) -> float | None:
    """The number at which running requests stand still while others wait."""
    waiting = decoding.where(lambda moment: waits(moment) and moment.num_decode > 0)
    if trades_memory(waiting):
        return None
    running = [(m.running, m.running_max or m.running) for m in waiting.moments if m.running]
    if len(running) < MIN_LINES:
        return None
    most = max(peak for _, peak in running)
    if most != int(most):
        return None
    if waiting.share(is_full) >= 0.5:
        return None  # memory holds them there
    # The mean of several batches is a little lower: a slot is empty until the next step.
    stands = sum(peak == most and mean >= NEARLY * most for mean, peak in running)
    near = sum(peak >= NEAR * most for _, peak in running)
    often = PINNED
    if most >= MANY and near >= NEARLY * len(running):
        is_round = most % 8 == 0 or most % 10 == 0
        often = SOMETIMES if is_round else MOSTLY
    return most if stands >= max(often * len(running), MIN_LINES) else None


def _prefill_tokens(facts: Facts, load: Load) -> tuple[float | None, bool]:
    """The prompt tokens that one prefill batch may have, and whether prompts are never split."""
    chunk = _size(facts.chunked_prefill_size, facts.options.get("chunked_prefill_size"))
    most = _size(facts.max_prefill_tokens, facts.options.get("max_prefill_tokens"))
    if chunk is None:
        seen = _usual_prefill(load)
        return (seen, False) if seen is not None else (most, True)
    if chunk > 0 and (most is None or most <= 0 or chunk <= most):
        return chunk, False
    return (most, True) if most and most > 0 else (None, True)


def _size(*values: Any) -> float | None:
    """The first of these that is a number."""
    for value in values:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return None


def _usual_prefill(load: Load) -> float | None:
    """The size at which batches stop, if no line names it: the last prompt is cut there."""
    prefills = [moment for moment in load.moments if moment.num_prefill]
    sizes = [moment.new_tokens / moment.num_prefill for moment in prefills]
    numbers = {moment.new_seqs for moment in prefills}
    if len(sizes) >= MANY_EQUAL and len(set(sizes)) == 1 and len(numbers) > 1:
        return sizes[0]  # one prompt or several: the sum is always the same
    if len(sizes) < MIN_SIZES or max(sizes) < MIN_BUDGET:
        return None
    usual = statistics.mode(sizes)
    same = sum(size >= AT_BUDGET * usual for size in sizes) >= 0.5 * len(sizes)
    if usual >= 0.98 * max(sizes) and sizes.count(usual) >= 3 and same:
        return usual
    # Prompts of natural lengths do not share the greatest length. Chunks of long prompts do, and
    # they follow one another.
    most = max(sizes)
    if most % MIN_BUDGET == 0 and sizes.count(most) >= MANY_EQUAL:
        return most
    is_row = usual >= MIN_BUDGET and sizes.count(usual) >= MANY_EQUAL and _row(sizes, usual) >= ROW
    return usual if is_row else None


def _row(sizes: Sequence[float], size: float) -> int:
    """The most batches of this size in a row."""
    return max((sum(1 for _ in row) for each, row in groupby(sizes) if each == size), default=0)
