"""What several checks need to put a finding together: lines to quote, confidence, effects."""

from __future__ import annotations

import math
from typing import Any

from setpoint.advisor.doctor.case import Case
from setpoint.advisor.doctor.equations import StepTime, fit_step_time
from setpoint.advisor.doctor.findings import Direction, Effect
from setpoint.advisor.doctor.load import Load
from setpoint.advisor.doctor.observations import Event, EventKind, Evidence

HIGHEST = 0.97
"""No check is surer than this of what it reads from a log."""

NOISE = 0.1
"""Share by which two measurements of one throughput differ."""


def quote(load: Load, count: int = 3) -> tuple[Evidence, ...]:
    """Some moments of a load, of its whole length: of those that tell of decode steps if these are
    enough, because they show usage and running requests as they are."""
    decoding = [moment for moment in load.moments if moment.num_decode]
    moments = decoding if len(decoding) >= count else load.moments
    if not moments:
        return ()
    count = min(count, len(moments))
    places = sorted({round(i * (len(moments) - 1) / max(count - 1, 1)) for i in range(count)})
    return tuple(Evidence(moments[place].line, moments[place].text) for place in places)


def quote_events(case: Case, kind: EventKind, count: int = 2) -> tuple[Evidence, ...]:
    found = events(case, kind)
    places = sorted({round(i * (len(found) - 1) / max(count - 1, 1)) for i in range(count)})
    return tuple(Evidence(found[place].line, found[place].text) for place in places if found)


def events(case: Case, kind: EventKind) -> list[Event]:
    return [event for rank in case.ranks for event in rank.events if event.kind == kind]


def said(case: Case, *names: str) -> tuple[Evidence, ...]:
    """The line that tells the first of these facts or options that is known."""
    found = [case.facts.said[name] for name in names if name in case.facts.said]
    return tuple(found[:1])


def once(evidence: tuple[Evidence, ...]) -> tuple[Evidence, ...]:
    """Without lines that are quoted already: the ready line tells several facts."""
    return tuple(dict.fromkeys(evidence))


def confidence(case: Case, share: float, load: Load, best: float = HIGHEST) -> float:
    """From how much of the time a cause holds (``share``), in how many moments it was seen, and
    how much of the source was understood."""
    seen = 1 - math.exp(-len(load) / 6)
    value = (0.35 + 0.65 * share) * (0.6 + 0.4 * seen) * (0.5 + 0.5 * case.seen.coverage)
    return round(max(0.05, min(value, best)), 2)


def step_time(case: Case) -> StepTime | None:
    """Time of a decode step by running requests, from the moments of this source that hold no
    prefill."""
    return fit_step_time(
        (moment.running, moment.running / moment.gen_throughput)
        for moment in case.load.moments
        if moment.num_decode and not moment.num_prefill and moment.running and moment.gen_throughput
    )


def throughput_effect(case: Case, running: float, growth: float) -> Effect:
    """Generated tokens per second if ``growth`` times as many requests run together. While reading
    the weights takes most of a step, throughput grows with the batch; later it saturates. So the
    factor is between 1 and growth, and noise adds 10 % on each side; this source's own steps say
    where in it we are, if it has several batch sizes."""
    growth = max(growth, 1.0)
    batches = f"{running * growth:,.0f} instead of {running:,.0f} requests run together"
    fitted = step_time(case)
    if fitted is None:
        return estimate(
            "output throughput",
            1 - NOISE,
            (1 + growth) / 2,
            growth + NOISE,
            f"{batches}, which gives between no gain and {growth:.1f} times as much; this is the "
            "middle, because no other batch size was observed that would tell how long its steps "
            "take",
        )
    expected = min(max(fitted.gain(running, growth), 1.0), growth)
    return estimate(
        "output throughput",
        1 + 0.5 * (expected - 1) - NOISE,
        expected,
        min(growth, 1 + 1.5 * (expected - 1)) + NOISE,
        f"{batches}; a decode step takes {1000 * fitted.base:.1f} ms plus "
        f"{1000 * fitted.per_request:.3g} ms for each of them (fitted to {fitted.num_points} "
        "observed batches)",
    )


def estimate(figure: str, low: float, expected: float, high: float, why: str) -> Effect:
    """An effect whose interval holds the expected value, whatever the observations were."""
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
    start = "" if present is None else f" from {plain(present)}"
    return f"{verb} {flag}{start} to {plain(value)}"


def plain(value: Any) -> str:
    """As it is typed: "16", "0.35", "fcfs"."""
    if isinstance(value, float):
        return f"{value:.0f}" if value == int(value) else f"{value:g}"
    return str(value)


def per_minute(case: Case) -> str:
    """As what there is: "no retractions", "1.5 retractions per minute"."""
    rate = case.retractions_per_minute
    if not rate:
        return "no retractions"
    if rate < 0.05:
        return "fewer than 0.1 retractions per minute"
    return f"{rate:.1f} retractions per minute"


def counted(number: int, one: str) -> str:
    """ "1 moment", "2,000 moments"."""
    return f"{number:,} {one}{'s' * (number != 1)}"
