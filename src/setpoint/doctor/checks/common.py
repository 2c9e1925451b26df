"""What several checks need to make a finding: lines to quote, confidence, effects."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from setpoint.core.moments import Moment
from setpoint.doctor.case import MANY_LINES, Case
from setpoint.doctor.findings import Direction, Effect
from setpoint.doctor.load import Load
from setpoint.doctor.observations import Event, EventKind, Evidence
from setpoint.doctor.phases import LINE_STEPS, MIN_GAP_S
from setpoint.doctor.step_times import (
    DecodeStep,
    FixedShare,
    careful_growth,
    fixed_share,
)

HIGHEST = 0.97
"""The highest confidence of a check that reads a log."""

MOST_OF_EXCERPT, LESS_PER_LINE = 0.75, 0.03
"""The highest confidence for an excerpt of nearly ten lines, and how much lower it is for each line
less."""

MOST_NAMED = 3
"""So many lines are named by their numbers in a sentence."""

NOISE = 0.1
"""Two measurements of the same throughput may differ by this share."""


def quote(load: Load, count: int = 3) -> tuple[Evidence, ...]:
    """Some moments from the whole length of a load: decode lines if there are enough, because they
    show usage and running requests as they are."""
    decoding = [moment for moment in load.moments if moment.num_decode]
    moments = decoding if len(decoding) >= count else load.moments
    if not moments:
        return ()
    count = min(count, len(moments))
    places = sorted({round(i * (len(moments) - 1) / max(count - 1, 1)) for i in range(count)})
    return tuple(Evidence(moments[place].line, moments[place].text) for place in places)


def quote_events(case: Case, kind: EventKind, count: int = 2) -> tuple[Evidence, ...]:
    return quote_some(events(case, kind), count)


def quote_some(found: Sequence[Event], count: int) -> tuple[Evidence, ...]:
    """Some of these events, from the first to the last."""
    places = sorted({round(i * (len(found) - 1) / max(count - 1, 1)) for i in range(count)})
    return tuple(Evidence(found[place].line, found[place].text) for place in places if found)


def events(case: Case, kind: EventKind) -> list[Event]:
    return [event for rank in case.ranks for event in rank.events if event.kind == kind]


def on_lines(case: Case, found: Sequence[Event]) -> str:
    """Where these events are: "line 39", "lines 39 and 87", "lines 39, 87, 95 and 12 more"."""
    numbers = []
    for event in found[:MOST_NAMED]:
        file = case.seen.files.get((event.line, event.text))
        numbers.append(f"{event.line:,}" + (f" of {file}" if file else ""))
    if len(found) > MOST_NAMED:
        numbers.append(f"{len(found) - MOST_NAMED} more")
    *first, last = numbers
    return f"lines {', '.join(first)} and {last}" if first else f"line {last}"


def survived(case: Case, event: Event, seconds: float) -> bool:
    """Whether the server went on to decode for at least this long after an event."""
    moments = (moment for rank in case.ranks for moment in rank.moments)
    after = [moment for moment in moments if moment.num_decode and moment.line > event.line > 0]
    return bool(after) and after[-1].at >= (event.at or 0.0) + seconds


def lines_on(case: Case, *names: str) -> tuple[Evidence, ...]:
    """The line that shows the first of these facts or options that is known."""
    found = [case.facts.said[name] for name in names if name in case.facts.said]
    return tuple(found[:1])


def once(evidence: tuple[Evidence, ...]) -> tuple[Evidence, ...]:
    """The evidence without repeated lines: the ready line shows several facts."""
    return tuple(dict.fromkeys(evidence))


def confidence(case: Case, share: float, load: Load, best: float = HIGHEST) -> float:
    """The confidence of a finding, from the share of the time in which the cause holds, the number
    of moments that show it, and how much of the source was understood."""
    seen = 1 - math.exp(-len(load) / 6)
    value = (0.35 + 0.65 * share) * (0.6 + 0.4 * seen) * (0.5 + 0.5 * case.seen.coverage)
    if case.is_excerpt:
        best = min(best, MOST_OF_EXCERPT - (MANY_LINES - len(case.load)) * LESS_PER_LINE)
    return round(max(0.05, min(value, best)), 2)


def sure_of(doublings: float) -> float:
    """The confidence for odds that were doubled so many times."""
    return float(1 / (1 + 2.0**-doublings))


SHORTEST_STEP_S = 1e-6
"""No decode step is shorter. A busy time is a difference of two sums, and an idle moment can leave
a remainder of rounding, which is not a step."""


def steps(case: Case) -> list[DecodeStep]:
    """The decode steps of this source, with those of ramp and drain, because their batches have
    other sizes. The throughput of a line is that of the time since the line before; its batch may
    have been another one then, and prefills may have run between."""
    interval = case.number("decode_log_interval") or LINE_STEPS
    found = (step for rank in case.ranks for step in _steps(rank.moments, interval))
    return [step for step in found if step.seconds >= SHORTEST_STEP_S]


def _steps(moments: Sequence[Moment], interval: float) -> Iterator[DecodeStep]:
    before: Moment | None = None  # the last decode batch without idleness since
    prompts = 0
    at = 0.0
    for moment in moments:
        if not 0 <= moment.at - at <= MIN_GAP_S:
            before = None
        at = moment.at
        if moment.busy_s is not None:
            if moment.num_decode and moment.running and moment.busy_s > 0:
                count = moment.num_decode
                yield DecodeStep(moment.busy_s / count, moment.running, moment.new_tokens / count)
            continue
        prompts += moment.new_tokens
        if not moment.num_decode:
            continue
        if before is not None and moment.running and moment.gen_throughput:
            running = (moment.running + (before.running or 0.0)) / 2
            num_steps = moment.num_decode * max(interval, 1)
            yield DecodeStep(running / moment.gen_throughput, running, prompts / num_steps)
        before, prompts = moment, 0


def fixed_share_of(case: Case, running: float) -> FixedShare:
    """The share of a step's time that does not depend on the batch, at this many running
    requests."""
    return fixed_share(steps(case), max(running, 1.0), case.facts.device)


LOOK_AGAIN = (
    " Then measure again: what was read does not show how much a still larger batch would gain."
)


def careful(case: Case, fixed: FixedShare, growth: float) -> tuple[float, str]:
    """The growth of the batch to advise, and a sentence to add to the advice. The growth is the
    given one if the steps of this source show its effect, else a smaller one, after which to
    measure again."""
    most = careful_growth(fixed.running, case.facts.device)
    if growth <= most or fixed.is_known:
        return growth, ""
    return most, LOOK_AGAIN


def throughput_effect(fixed: FixedShare, growth: float) -> Effect:
    """The effect on output throughput if ``growth`` times as many requests run together. While
    reading the weights takes most of a step, throughput grows with the batch; later it saturates.
    So the factor is between 1 and growth, and noise adds 10 % or more on each side. The steps of
    all batch sizes in this source say where in that interval it is."""
    growth = max(growth, 1.0)
    low, expected, high = fixed.gains(growth)
    noise = max(NOISE, fixed.scatter)
    return estimate(
        "output throughput",
        low - noise,
        expected,
        high + noise,
        batch_instead(fixed, growth),
    )


def batch_instead(fixed: FixedShare, growth: float) -> str:
    """The reason of an effect that follows from another batch size."""
    source = (
        f"estimated from {counted(fixed.num_steps, 'observed step time')}"
        if fixed.num_steps
        else "no step times were observed, so this is all that is possible"
    )
    return (
        f"{counted(round(fixed.running * growth), 'request')} instead of {fixed.running:,.0f} run "
        f"together; "
        f"about {percent(fixed.share)} ({percent(fixed.low)} to {percent(fixed.high)}) of the time "
        f"of a decode step does not grow with the batch ({source})"
    )


def estimate(figure: str, low: float, expected: float, high: float, why: str) -> Effect:
    """An effect whose interval contains the expected value, whatever the observations were."""
    low, high = min(low, high), max(low, high)
    expected = min(max(expected, low), high)
    return Effect(figure, round(low, 3), round(expected, 3), round(high, 3), why)


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def during(share: float) -> str:
    """ "for 97 % of the time under load"."""
    if share > 0.995:
        return "throughout the load"
    return f"for {percent(share)} of the time under load"


def change(direction: Direction, flag: str, value: Any, present: float | None = None) -> str:
    """ "Raise --max-running-requests from 16 to 64"."""
    verb = {"increase": "Raise", "decrease": "Lower", "set": "Set"}[direction]
    start = "" if present is None else f" from {as_typed(present)}"
    return f"{verb} {flag}{start} to {as_typed(value)}"


def whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def as_typed(value: Any) -> str:
    """The value as it is typed: "16", "0.35", "fcfs"."""
    if isinstance(value, float):
        return f"{value:.0f}" if value == int(value) else f"{value:g}"
    return str(value)


def per_minute(case: Case) -> str:
    """The rate of retractions in words: "no retractions", "1.5 retractions per minute"."""
    rate = case.retractions_per_minute
    if not rate:
        return "no retractions"
    if rate < 0.05:
        return "fewer than 0.1 retractions per minute"
    return f"{rate:.1f} retractions per minute"


def counted(number: int, one: str) -> str:
    """ "1 moment", "2,000 moments"."""
    return f"{number:,} {one}{'s' * (number != 1)}"


def acting(number: float, one: str, verb: str) -> str:
    """ "1 request waits", "3 requests wait"."""
    return f"{counted(round(number), one)} {verb}{'s' * (round(number) == 1)}"
