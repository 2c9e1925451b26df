"""admission-delayed: an option makes admission wait."""

from __future__ import annotations

import itertools

from setpoint.core.moments import Moment
from setpoint.doctor.binding_limit import at_cap, binding_limit, is_full, other_pool
from setpoint.doctor.case import Case
from setpoint.doctor.checks.check import Check
from setpoint.doctor.checks.common import change, confidence, during, lines_on, percent, quote
from setpoint.doctor.findings import Action, Finding, RuledOut
from setpoint.doctor.load import Load
from setpoint.doctor.phases import waits

MIN_SHARE = 0.4
FALLS = 0.15
"""Share of the running requests that end in a row of decode lines while nobody takes their place;
two of them, at least."""
DELAYS = {
    "decode_turn": {"prefill_decode_interval": 0, "num_continuous_decode_steps": 1},
    "delayed": {"min_free_slots_delay": 1, "enable_prefill_delayer": 0},
}
"""Reason of a refusal (core.records.AdmissionRefusal) -> the options that cause it, each with the
largest value at which it delays nothing."""


def find(case: Case) -> Finding | None:
    return _named(case) or _seen(case)


def _seen(case: Case) -> Finding | None:
    """What a log shows of it: again and again, running requests end while others wait and memory
    is free, and no prefill batch comes until many have ended."""
    if not case.has_load or case.limits.reasons:
        return None
    held = held_back(case)
    share = _share(case, held)
    action = next(
        (found for reason in DELAYS if (found := _delay_less(case, reason)) is not None), None
    )
    if share < MIN_SHARE or action is None:
        return None
    queue = held.median(lambda moment: moment.queue) or 1.0
    return Finding(
        cause="admission-delayed",
        confidence=confidence(case, 0.9, held, 0.85),
        summary=f"An option delays admission: {during(share)}, running requests end and about "
        f"{queue:,.0f} wait, but none is admitted, although "
        f"{percent(1 - (held.median(lambda moment: moment.usage) or 0.0))} of the KV pool is free.",
        evidence=quote(held) + lines_on(case, *(name for each in DELAYS.values() for name in each)),
        action=action,
        ruled_out=(
            RuledOut(
                "kv-conservative",
                "Each request that ends gives back its memory and its reserve. If the reserve kept "
                "requests out, the next one would be admitted then.",
            ),
        ),
        risk="More prefill between decode steps makes the time between tokens less even.",
        verify="The time to first token falls, and prefill lines follow one another more closely.",
        falsify="Requests wait just as long after the change.",
        share=round(share, 3),
    )


def held_back(case: Case) -> Load:
    """The decode lines of those rows without a prefill in between, all with requests waiting, in
    whose course the number of running requests falls clearly."""
    kept: set[int] = set()
    for load in case.loads.values():
        row: list[Moment] = []
        for moment in load.moments:
            if _could_admit(case, moment):
                row.append(moment)
                continue
            _keep(row, kept)
            row = []
        _keep(row, kept)
    return case.load.where(lambda moment: id(moment) in kept)


def _share(case: Case, held: Load) -> float:
    """Its share of the loaded time, with the time from the last decode line of each row to the
    prefill line that ends it: decode went on until then."""
    kept = {id(moment) for moment in held.moments}
    time = sum(held.weights)
    for load in case.loads.values():
        pairs = itertools.pairwise(zip(load.moments, load.weights, strict=True))
        time += sum(
            weight
            for (before, _), (moment, weight) in pairs
            if id(before) in kept and moment.num_prefill and not moment.num_decode
        )
    return time / (sum(case.load.weights) or 1.0)


def _could_admit(case: Case, moment: Moment) -> bool:
    return (
        moment.num_decode > 0
        and not moment.num_prefill
        and not moment.retractions
        and waits(moment)
        and not is_full(moment)
        and not at_cap(moment, case.limits)
        and other_pool(moment) is None
    )


def _keep(row: list[Moment], kept: set[int]) -> None:
    if len(row) < 2:
        return
    first, last = row[0].running or 0.0, row[-1].running or 0.0
    if first - last >= max(FALLS * first, 2.0):
        kept.update(id(moment) for moment in row)


def _named(case: Case) -> Finding | None:
    """What the scheduler itself gives as its reason."""
    delayed = case.load.where(
        lambda moment: binding_limit(moment, case.limits) == "admission-delayed"
    )
    share = sum(delayed.weights) / (sum(case.load.weights) or 1.0)
    action = _action(case, delayed)
    if not case.has_load or share < MIN_SHARE or action is None:
        return None
    queue = delayed.median(lambda moment: moment.queue) or 1.0
    return Finding(
        cause="admission-delayed",
        confidence=confidence(case, share, delayed, 0.9),
        summary=f"An option delays admission: {during(share)}, it is the scheduler's main reason "
        f"not to admit requests, while about {queue:,.0f} wait.",
        evidence=quote(delayed)
        + lines_on(case, *(name for each in DELAYS.values() for name in each)),
        action=action,
        ruled_out=(
            RuledOut("kv-conservative", "The scheduler names the delay as its reason, not memory."),
        ),
        risk="More prefill between decode steps makes the time between tokens less even.",
        verify="The time to first token falls.",
        falsify="Requests wait just as long after the change.",
        share=round(share, 3),
    )


def _action(case: Case, delayed: Load) -> Action | None:
    """A smaller delay by the option behind the most frequent reason; None if no such option is
    set."""
    counts = {
        reason: sum(moment.refusals.get(reason, 0) for moment in delayed.moments)
        for reason in DELAYS
    }
    for reason in sorted(counts, key=lambda reason: -counts[reason]):
        if (action := _delay_less(case, reason)) is not None:
            return action
    return None


def _delay_less(case: Case, reason: str) -> Action | None:
    """The change of the first option of this reason that is set."""
    for option, off in DELAYS[reason].items():
        flag, present = f"--{option.replace('_', '-')}", case.option(option, off)
        if present is True:
            text = f"Remove {flag} from the command line, or switch it off while it serves."
            return Action(text, flag, "set", False, live=True)
        if isinstance(present, int | float) and present > off:
            value = max(int(present // 2), off)
            text = change("decrease", flag, value, present) + "."
            return Action(text, flag, "decrease", value, live=True)
    return None


CHECK = Check(
    cause="admission-delayed",
    title="An option delays admission",
    find=find,
    meaning="Some options hold new requests back on purpose: for a fixed number of decode steps "
    "between prefills, or until several requests can be admitted together. That keeps the time "
    "between tokens even, but makes the time to first token longer.",
    rule="For at least 40 % of the time under load, such a delay is the scheduler's main reason "
    "not to admit a request; Setpoint's own records contain these reasons. In a log: for at least "
    "40 % of the time, the lines from one prefill batch to the next show that running requests end "
    "(15 % of them or more), that others wait all the time, and that the KV pool and the limit on "
    "running requests have room; and the options of the start name such a delay.",
    counter_evidence="It is not reported if the scheduler gives another reason more often, or if "
    "no option that delays admission is set.",
    advice="Lower or remove the option that delays: --prefill-decode-interval, "
    "--num-continuous-decode-steps, --min-free-slots-delay or --enable-prefill-delayer.",
    guide="The guides do not cover it.",
)
