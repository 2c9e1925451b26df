"""kv-optimistic: too many requests are admitted, so running ones are retracted."""

from __future__ import annotations

from setpoint.doctor.case import Case
from setpoint.doctor.checks.check import Check
from setpoint.doctor.checks.common import (
    change,
    confidence,
    counted,
    estimate,
    events,
    per_minute,
    percent,
    quote,
    quote_events,
)
from setpoint.doctor.equations import (
    MAX_CONSERVATIVENESS,
    conservativeness_against_retractions,
)
from setpoint.doctor.findings import Action, Effect, Finding, RuledOut

MIN_RETRACTIONS = 3
MIN_IN_EXCERPT = 2
"""Among a few lines: so close together they are no single event."""
MAX_RATE = 1.2
"""Most retractions per minute of one rank that are still fine: the guides say about one."""
HIGH_USAGE = 0.8
EFFECTIVE = 0.95 * MAX_CONSERVATIVENESS
"""From this value on, a larger one changes nothing."""
EXPECTED = 0.5
"""Expected factor of the retractions; 0.33 and 0.79 were measured (docs/notebook.md)."""


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

    return Finding(
        cause="kv-optimistic",
        confidence=confidence(case, strength, case.load, 0.95),
        summary="Too many requests are admitted, so running ones are retracted: "
        f"{counted(case.num_retractions, 'time')} ({per_minute(case)}), the KV pool was full and "
        "running requests went back to the queue.",
        evidence=quote_events(case, "retraction", 2) + quote(high, 2),
        action=Action(
            change("increase", "--schedule-conservativeness", wanted, present)
            + ", so that the server reserves more memory for the output of running requests.",
            "--schedule-conservativeness",
            "increase",
            wanted,
            live=True,
        ),
        effect=_effect(present, wanted, ratios),
        ruled_out=_alternatives(case, present, usage),
        risk="Fewer requests run at once. If outputs are shorter than expected, memory stays "
        "unused.",
        verify="The log shows at most about one retraction a minute, and KV pool usage (token "
        "usage) stays above 0.9.",
        falsify="Retractions go on with --schedule-conservativeness 1.43. Then the KV pool is too "
        "small for the load (see kv-full).",
        share=round(sum(high.weights) / total, 3)
        if (total := sum(case.decoding.weights))
        else None,
    )


def retracts_often(case: Case) -> bool:
    least = MIN_IN_EXCERPT if case.is_excerpt else MIN_RETRACTIONS
    return case.num_retractions >= least and case.retractions_per_minute > MAX_RATE


def _effect(present: float, wanted: float, ratios: list[float]) -> Effect:
    source = (
        f"from the median new-token ratio after {counted(len(ratios), 'retraction')}"
        if ratios
        else "the guides' value, because no line shows the new-token ratio"
    )
    factor = wanted / max(present, 0.01)
    return estimate(
        "retractions per minute",
        0.0,
        EXPECTED,
        1.0,
        f"the memory reserve becomes {factor:.1f} times as large ({source}). The interval is wide "
        "because nobody knows how long the next outputs will be",
    )


def _alternatives(case: Case, present: float, usage: float | None) -> tuple[RuledOut, ...]:
    why = [
        RuledOut(
            "kv-full",
            f"--schedule-conservativeness is {present:g}; raising it helps up to "
            f"{MAX_CONSERVATIVENESS}.",
        )
    ]
    if usage is not None:
        why.append(
            RuledOut(
                "kv-conservative",
                f"{percent(usage)} or more of the KV pool is in use for a quarter of the time: "
                "little memory is held back.",
            )
        )
    why.append(
        RuledOut("healthy", f"There are {per_minute(case)}; about one a minute would be fine.")
    )
    return tuple(why)


CHECK = Check(
    cause="kv-optimistic",
    title="Too many requests are admitted, so running ones are retracted",
    find=find,
    meaning="The scheduler admits more requests than its memory could hold at full length, because "
    "most end before their max_new_tokens. If outputs turn out longer than it expected, the KV "
    "pool fills up in the middle of decode. Some running requests are then retracted: they lose "
    "their memory, go back to the queue, and their prompts and outputs are computed again. Their "
    "clients see a pause, and the work is done twice.",
    rule="There are at least three retractions (two in an excerpt of a few lines), at more than "
    "about one a minute, while more than 80 % of the KV pool is in use, and "
    "--schedule-conservativeness is below 1.43, from which on raising it changes nothing. If the "
    "rate is lower in the last three quarters of the time, that rate counts, unless "
    "--schedule-conservativeness is below its default of 1 and retractions come back there.",
    counter_evidence="About one retraction a minute is the price of a well-used KV pool, and fine. "
    "With --schedule-conservativeness 1.43 the new-token ratio starts at 1: all of max_new_tokens "
    "is reserved, and a larger value changes nothing. Then the pool is too small (kv-full).",
    advice="Raise --schedule-conservativeness, with the value.",
    guide="SGLang's tuning guides of all years: if token usage is very high and lines such as 'KV "
    "cache pool is full. Retract requests.' (2024: 'decode out of memory happened') are frequent, "
    "raise --schedule-conservativeness to a value such as 1.3. Occasional retractions are fine "
    "(2025 and later: about one a minute).",
    equation="After a retraction the scheduler sets the new-token ratio to what requests turned "
    "out to need: (generated + 20 n) / allowed output tokens. With conservativeness c it starts at "
    "0.7 c. So c = median ratio after retractions / 0.7, at least 1.15 x today's, at most 1.43.",
    picture="""\
KV pool 100 % |      .--x   .--x   .--x      x  a request is retracted:
in use        |   .-'   '.-'   '.-'             its memory is freed,
         80 % | .'                              its work is lost
              +------------------------> time""",
)
