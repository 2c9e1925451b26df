"""host-bound: the device waits for the scheduler's own work."""

from __future__ import annotations

from setpoint.advisor.doctor.case import Case
from setpoint.advisor.doctor.checks.check import Check
from setpoint.advisor.doctor.checks.common import confidence, estimate, percent, quote
from setpoint.advisor.doctor.findings import Action, Finding, RuledOut
from setpoint.observe.moments import Moment

MIN_HOST = 0.4
"""Share of the loop's busy time that is not spent in the model."""
MIN_BUSY = 0.8
STREAM_INTERVAL = 8


def find(case: Case) -> Finding | None:
    known = case.load.where(lambda moment: bool(moment.busy_s) and moment.model_s is not None)
    if not case.has_load or len(known) < 5:
        return None
    busy = sum(moment.busy_s or 0.0 for moment in known.moments)
    model = sum(moment.model_s or 0.0 for moment in known.moments)
    seconds = sum(known.weights) if known.has_clock else 0.0
    host = 1 - model / busy
    if not seconds > 0 or host < MIN_HOST or busy < MIN_BUSY * seconds:
        return None
    at = known.where(lambda moment: _host_share(moment) >= MIN_HOST)
    return Finding(
        cause="host-bound",
        confidence=confidence(case, len(at) / len(known), known, 0.9),
        summary=f"The device waits for the host: {percent(host)} of the loop's busy time are spent "
        "outside the model.",
        evidence=quote(at),
        action=_action(case),
        effect=estimate(
            "output throughput",
            1.0,
            0.5 + 0.5 * busy / max(model, 0.5 * busy),
            busy / max(model, 0.01 * busy),
            f"busy time / time in the model: {busy:.1f} s / {model:.1f} s, if nothing else were "
            "left",
        ),
        ruled_out=(
            RuledOut(
                "client-bound",
                f"The loop is busy in {percent(min(busy / seconds, 1.0))} of the time.",
            ),
        ),
        risk="Clients get several tokens at once instead of one by one.",
        verify="The share of the model in the loop's busy time rises.",
        falsify="The share stays the same with fewer events to clients: then planning or sampling "
        "on the host is what takes the time.",
        share=min(host, 1.0),
    )


def _host_share(moment: Moment) -> float:
    return 1 - (moment.model_s or 0.0) / moment.busy_s if moment.busy_s else 0.0


def _action(case: Case) -> Action:
    present = case.number("stream_interval") or 1
    if present >= STREAM_INTERVAL:
        return Action(
            "See where the loop's time goes (`setpoint bench`, breakdown), and give the process "
            "cores of its own."
        )
    return Action(
        f"Start the server with --stream-interval {STREAM_INTERVAL} (now {present:.0f}): clients "
        "get fewer and larger pieces, and each step has less to send.",
        "--stream-interval",
        "increase",
        STREAM_INTERVAL,
    )


CHECK = Check(
    cause="host-bound",
    title="The device waits for the host",
    find=find,
    meaning="Between two steps of the model the host takes in requests, plans the next step, looks "
    "at the sampled tokens and sends them. With a small model, a large batch or many streams this "
    "may take as long as the step itself.",
    rule="At least 40 % of the loop's busy time are outside the model, and the loop is busy in at "
    "least 80 % of the loaded time. Only Setpoint's own records tell.",
    counter_evidence="A loop that waits for requests is not busy: that time does not count.",
    guide="The guide of 2024 has --enable-overlap-scheduler for it, which is the default today.",
    picture="""\
host    [plan][send]        [plan][send]
device              [model]             [model]     idle half the time""",
)
