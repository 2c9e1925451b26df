"""admission-delayed: an option makes admission wait."""

from __future__ import annotations

from setpoint.doctor.case import Case
from setpoint.doctor.checks.check import Check
from setpoint.doctor.checks.common import change, confidence, during, quote, said
from setpoint.doctor.findings import Action, Finding, RuledOut
from setpoint.doctor.limits import binding_limit
from setpoint.doctor.load import Load

MIN_SHARE = 0.4
DELAYS = {
    "decode_turn": {"prefill_decode_interval": 0, "num_continuous_decode_steps": 1},
    "delayed": {"min_free_slots_delay": 1, "enable_prefill_delayer": 0},
}
"""Reason of a refusal (core.records.Refusal) -> the options that cause it, each with the largest
value at which it delays nothing."""


def find(case: Case) -> Finding | None:
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
        evidence=quote(delayed) + said(case, *(name for each in DELAYS.values() for name in each)),
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
    """Delay less, by the option behind the most frequent reason. None if no such option is set."""
    counts = {
        reason: sum(moment.refusals.get(reason, 0) for moment in delayed.moments)
        for reason in DELAYS
    }
    for reason in sorted(counts, key=lambda reason: -counts[reason]):
        for option, off in DELAYS[reason].items():
            flag, present = f"--{option.replace('_', '-')}", case.option(option, off)
            if present is True:
                text = f"Remove {flag} from the command line, or switch it off while it serves."
                return Action(text, flag, "set", False, live=True)
            if present > off:
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
    "not to admit a request. Only Setpoint's own records contain these reasons.",
    counter_evidence="It is not reported if the scheduler gives another reason more often, or if "
    "no option that delays admission is set.",
    guide="The guides do not cover it.",
)
