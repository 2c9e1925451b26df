"""admission-delayed: an option makes admission wait."""

from __future__ import annotations

from setpoint.doctor.case import Case
from setpoint.doctor.checks.check import Check
from setpoint.doctor.checks.common import change, confidence, during, quote, said
from setpoint.doctor.findings import Action, Finding, RuledOut
from setpoint.doctor.limits import binding_limit

MIN_SHARE = 0.4


def find(case: Case) -> Finding | None:
    delayed = case.load.where(
        lambda moment: binding_limit(moment, case.limits) == "admission-delayed"
    )
    share = sum(delayed.weights) / (sum(case.load.weights) or 1.0)
    if not case.has_load or share < MIN_SHARE:
        return None
    queue = delayed.median(lambda moment: moment.queue) or 1.0
    return Finding(
        cause="admission-delayed",
        confidence=confidence(case, share, delayed, 0.9),
        summary=f"An option delays admission: {during(share)}, it is the scheduler's main reason "
        f"not to admit requests, while about {queue:,.0f} wait.",
        evidence=quote(delayed) + said(case, "prefill_decode_interval", "enable_prefill_delayer"),
        action=_action(case),
        ruled_out=(
            RuledOut("kv-conservative", "The scheduler names the delay as its reason, not memory."),
        ),
        risk="More prefill between decode steps makes the time between tokens less even.",
        verify="The time to first token falls.",
        falsify="Requests wait just as long after the change.",
        share=round(share, 3),
    )


def _action(case: Case) -> Action:
    for flag, option in (
        ("--prefill-decode-interval", "prefill_decode_interval"),
        ("--num-continuous-decode-steps", "num_continuous_decode_steps"),
        ("--min-free-slots-delay", "min_free_slots_delay"),
    ):
        present = case.number(option)
        if present and present > 1:
            value = int(present // 2)
            text = change("decrease", flag, value, present) + "."
            return Action(text, flag, "decrease", value, live=True)
    return Action("Remove --enable-prefill-delayer from the command line and restart.")


CHECK = Check(
    cause="admission-delayed",
    title="An option delays admission",
    find=find,
    meaning="Some options hold new requests back on purpose: for a fixed number of decode steps "
    "between prefills, or until several requests can be admitted together. That keeps the time "
    "between tokens even, but makes the time to first token longer.",
    rule="For at least 40 % of the time under load, such a delay is the scheduler's main reason "
    "not to admit a request. Only Setpoint's own records contain these reasons.",
    counter_evidence="It is not reported if the scheduler gives another reason more often.",
    guide="The guides do not cover it.",
)
