"""kv-optimistic: too many requests are admitted, and running ones are thrown back."""

from __future__ import annotations

from setpoint.advisor.doctor.case import Case
from setpoint.advisor.doctor.checks.check import Check
from setpoint.advisor.doctor.checks.common import (
    confidence,
    estimate,
    events,
    per_minute,
    percent,
    quote,
    quote_events,
)
from setpoint.advisor.doctor.equations import (
    MAX_CONSERVATIVENESS,
    conservativeness_against_retractions,
)
from setpoint.advisor.doctor.findings import Action, Effect, Finding, RuledOut

MIN_RETRACTIONS = 3
MAX_RATE = 1.2
"""Retractions per minute of one rank that are still fine: the guides say about one."""
HIGH_USAGE = 0.8
EFFECTIVE = 0.95 * MAX_CONSERVATIVENESS
"""From here on, a larger value changes nothing."""


def find(case: Case) -> Finding | None:
    rate, present = case.retractions_per_minute, case.conservativeness
    if not retracts_often(case) or present >= EFFECTIVE:
        return None
    usage = case.decoding.quantile(lambda moment: moment.usage_max or moment.usage, 0.75)
    if usage is not None and usage < HIGH_USAGE:
        return None
    ratios = [
        value
        for event in events(case, "retraction")
        if isinstance(value := event.values.get("ratio_after"), int | float)
    ]
    wanted = conservativeness_against_retractions(present, ratios)
    strength = min(1.0, 0.5 + 0.25 * rate / MAX_RATE) * min(1.0, case.num_retractions / 5)
    high = case.decoding.where(lambda moment: (moment.usage or 0.0) >= HIGH_USAGE)
    used = "" if usage is None else f" while {percent(usage)} of the KV pool is used"
    return Finding(
        cause="kv-optimistic",
        confidence=confidence(case, strength, case.load, 0.95),
        summary=f"Too many requests are admitted: {case.num_retractions} times ({per_minute(case)})"
        f" running requests lost their memory{used}.",
        evidence=quote_events(case, "retraction", 2) + quote(high, 2),
        action=Action(
            f"Start the server with --schedule-conservativeness {wanted:g} (now {present:g}).",
            "--schedule-conservativeness",
            "increase",
            wanted,
            live=True,
        ),
        effect=_effect(present, wanted, ratios),
        ruled_out=_alternatives(case, present, usage),
        risk="Fewer requests run at once; if outputs are shorter than expected, memory stays free.",
        verify="At most about one line 'Retract requests' a minute, and usage stays above 0.9.",
        falsify="Retractions go on at a conservativeness of 1.4: then the pool is too small for "
        "the outputs (see kv-full).",
        share=round(sum(high.weights) / (sum(case.decoding.weights) or 1.0), 3),
    )


def retracts_often(case: Case) -> bool:
    return case.num_retractions >= MIN_RETRACTIONS and case.retractions_per_minute > MAX_RATE


def _effect(present: float, wanted: float, ratios: list[float]) -> Effect:
    source = (
        f"the median ratio after {len(ratios)} retractions, divided by 0.7"
        if ratios
        else "no line tells the ratio, so this is the guides' value"
    )
    factor = wanted / max(present, 0.01)
    return estimate(
        "retractions per minute",
        0.0,
        min(1.0, 1 / factor**2),
        1.0,
        f"the reserve of a new batch becomes {factor:.2f} times as large ({source}); how much of "
        "it outputs use varies, so that the interval is wide",
    )


def _alternatives(case: Case, present: float, usage: float | None) -> tuple[RuledOut, ...]:
    why = [
        RuledOut(
            "kv-full",
            f"--schedule-conservativeness is {present:g}: up to {MAX_CONSERVATIVENESS} it still "
            "makes a difference.",
        )
    ]
    if usage is not None:
        why.append(
            RuledOut(
                "kv-conservative",
                f"Usage is {usage:.2f} or more in a quarter of the time: memory is not held back.",
            )
        )
    why.append(
        RuledOut("healthy", f"{per_minute(case)} are more than the one a minute that is fine.")
    )
    return tuple(why)


CHECK = Check(
    cause="kv-optimistic",
    title="Too many requests are admitted, and running ones are thrown back",
    find=find,
    meaning="The scheduler admits more requests than it has memory for, because most end before "
    "their max_new_tokens. If they grow longer than it expected, the pool fills up in the middle "
    "of decoding: some running requests lose their memory, go back to the queue, and their prompts "
    "and outputs are computed again. Their clients see a pause; the work is done twice.",
    rule="At least three retractions, at more than about one a minute of busy time, while usage is "
    "above 0.8, and --schedule-conservativeness is not at its effective maximum of 1.43.",
    counter_evidence="About one retraction a minute is the price of a full pool, and fine. At a "
    "conservativeness of 1.43 the initial ratio is 1, every token that may come is reserved, and "
    "more of it does nothing: then the pool is too small (kv-full).",
    guide="SGLang's tuning guides of all years: if usage is very high and lines such as 'KV cache "
    "pool is full. Retract requests.' (2024: 'decode out of memory happened') are frequent, raise "
    "--schedule-conservativeness to a value like 1.3; occasionally is okay (2025 and later: about "
    "once a minute).",
    equation="After a retraction the scheduler sets ratio = (generated + 20 n) / allowed outputs: "
    "what requests turned out to need. A new batch starts at ratio = 0.7 c. So "
    "c = median ratio after retractions / 0.7, at least 1.15 x today's, at most 1.43.",
    picture="""\
usage 1.0 |      .--x   .--x   .--x      x  a request is thrown back:
          |   .-'   '.-'   '.-'             its memory is free again,
      0.8 | .'                              its work is lost
          +------------------------> time""",
)
