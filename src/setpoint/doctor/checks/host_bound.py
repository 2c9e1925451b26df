"""host-bound: the device waits for the scheduler's own work."""

from __future__ import annotations

from setpoint.core.moments import Moment
from setpoint.doctor.case import Case
from setpoint.doctor.checks.check import Check
from setpoint.doctor.checks.common import (
    change,
    confidence,
    during,
    estimate,
    percent,
    quote,
)
from setpoint.doctor.findings import Action, Finding, RuledOut

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
        summary=f"The device waits for the host: while the server is busy, {percent(host)} of the "
        "time is spent outside the model, on scheduling, sampling and sending.",
        evidence=quote(at),
        action=_action(case),
        effect=estimate(
            "output throughput",
            1.0,
            0.5 + 0.5 * busy / max(model, 0.5 * busy),
            busy / max(model, 0.01 * busy),
            f"the server was busy for {busy:.1f} s, {model:.1f} s of it in the model; at best, "
            "nothing else would be left",
        ),
        ruled_out=(
            RuledOut(
                "client-bound",
                f"The scheduler is busy {during(min(busy / seconds, 1.0))}.",
            ),
        ),
        risk="Clients receive several tokens at once instead of one by one.",
        verify="Output throughput (gen throughput) rises.",
        falsify="Output throughput stays the same with fewer messages to clients. Then scheduling "
        "or sampling on the host is what takes the time.",
        share=min(host, 1.0),
    )


def _host_share(moment: Moment) -> float:
    return 1 - (moment.model_s or 0.0) / moment.busy_s if moment.busy_s else 0.0


def _action(case: Case) -> Action:
    present = case.number("stream_interval") or 1
    if present >= STREAM_INTERVAL:
        return Action(
            "Measure where the time goes (the breakdown of setpoint bench), and give the server "
            "CPU cores of its own."
        )
    return Action(
        change("increase", "--stream-interval", STREAM_INTERVAL, present)
        + ": clients then receive fewer, larger pieces, and each step has less to send.",
        "--stream-interval",
        "increase",
        STREAM_INTERVAL,
    )


CHECK = Check(
    cause="host-bound",
    title="The device waits for the host",
    find=find,
    meaning="Between two steps of the model, the host (the CPU side of the server) receives "
    "requests, plans the next step, processes the sampled tokens and sends them. With a small "
    "model, a large batch or many streams, this can take as long as the step itself.",
    rule="While the server is busy, at least 40 % of the time is spent outside the model, and it "
    "is busy for at least 80 % of the time under load. Only Setpoint's own records contain these "
    "times.",
    counter_evidence="Time in which the server waits for requests does not count as busy.",
    advice="Raise --stream-interval; if it is high already, give the server CPU cores of its own.",
    guide="The guide of 2024 recommends --enable-overlap-scheduler for it; today that is the "
    "default.",
    picture="""\
host    [plan][send]        [plan][send]
device              [model]             [model]     idle in between""",
)
