"""admission-delayed: an option makes admission wait."""

from __future__ import annotations

from setpoint.advisor.doctor.case import Case
from setpoint.advisor.doctor.checks.check import Check
from setpoint.advisor.doctor.checks.common import confidence, percent, quote, said
from setpoint.advisor.doctor.findings import Action, Finding, RuledOut
from setpoint.advisor.doctor.limits import binding_limit

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
        summary=f"An option makes admission wait: in {percent(share)} of the loaded time this is "
        f"the scheduler's main reason, while about {queue:.0f} requests wait.",
        evidence=quote(delayed) + said(case, "prefill_decode_interval", "enable_prefill_delayer"),
        action=_action(case),
        ruled_out=(
            RuledOut("kv-conservative", "The scheduler's own reasons name the delay, not memory."),
        ),
        risk="More prefills between decode steps make the time between tokens less even.",
        verify="The time to the first token falls.",
        falsify="Requests wait as long without the option.",
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
            text = f"Start the server with {flag} {value} (now {present:.0f})."
            return Action(text, flag, "decrease", value, live=True)
    return Action("Start the server without --enable-prefill-delayer.")


CHECK = Check(
    cause="admission-delayed",
    title="An option makes admission wait",
    find=find,
    meaning="Some options hold new requests back on purpose: for a fixed number of decode steps "
    "between prefills, or until several can be admitted together. That keeps the time between "
    "tokens even, and lengthens the time to the first one.",
    rule="In at least 40 % of the loaded time the scheduler's main reason for not admitting a "
    "request is such a delay. Only Setpoint's own records tell.",
    counter_evidence="Any other reason that is given more often.",
    guide="The guides do not have it.",
)
