"""batch-too-large: tokens come slowly because too many requests share each step."""

from __future__ import annotations

from setpoint.core.moments import Moment
from setpoint.doctor.case import Case
from setpoint.doctor.checks.check import Check
from setpoint.doctor.checks.common import (
    NOISE,
    batch_instead,
    confidence,
    counted,
    estimate,
    fixed_share_of,
    percent,
    quote,
)
from setpoint.doctor.equations import rounded
from setpoint.doctor.findings import Action, Effect, Finding, RuledOut
from setpoint.doctor.step_times import FixedShare

SLOW_S = 0.1
"""Time between tokens that readers notice: ten tokens a second."""
ONLINE_S = 0.05
"""The same for a server that is set up for low latency."""
MIN_RUNNING = 16


def find(case: Case) -> Finding | None:
    online = case.option("workload") == "online"
    target = ONLINE_S if online else SLOW_S
    measured = case.load.where(lambda moment: _between_tokens(moment) is not None)
    if not case.has_load or not len(measured):
        return None
    latency = measured.median(_between_tokens)
    running = case.decoding.median(lambda moment: moment.running)
    if latency is None or latency < target or running is None or running < MIN_RUNNING:
        return None
    fixed = fixed_share_of(case, running)
    if fixed.is_known and fixed.share > 0.5:
        return None  # most of a step's time is the same with any batch
    value = max(rounded(running * _growth(target / latency, fixed)), 1)
    if value >= running:
        return None
    return Finding(
        cause="batch-too-large",
        confidence=confidence(
            case, 0.9 if fixed.is_known else 0.6, measured, 0.9 if fixed.is_known else 0.75
        ),
        summary=f"The batch is too large for low latency: with "
        f"{counted(round(running), 'running request')}, "
        f"the time between two tokens of a request is {1000 * latency:,.0f} ms (median).",
        evidence=quote(measured),
        action=Action(
            f"Lower --max-running-requests to {value}; further requests then wait in the queue.",
            "--max-running-requests",
            "decrease",
            value,
            live=True,
        ),
        effect=_effect(fixed, value / running),
        ruled_out=_alternatives(case, fixed),
        risk="With fewer requests at once, output throughput falls and requests wait longer for "
        "their first token.",
        verify=f"The median time between tokens falls to about {1000 * target:.0f} ms.",
        falsify="The time between tokens stays the same with fewer running requests. Then prefill "
        "between the decode steps, or the device itself, is what is slow.",
        share=round(measured.share(lambda m: (_between_tokens(m) or 0.0) >= target), 3),
    )


def _between_tokens(moment: Moment) -> float | None:
    return moment.quantiles.get("itl_p50")


def _growth(slowdown: float, fixed: FixedShare) -> float:
    """The factor of the batch with which a step takes ``slowdown`` times as long; ``slowdown``
    itself if the fixed share is not known, or if no batch is small enough."""
    if fixed.is_known and fixed.share < slowdown:
        return (slowdown - fixed.share) / (1 - fixed.share)
    return slowdown


def _effect(fixed: FixedShare, growth: float) -> Effect:
    low, expected, high = fixed.slowdowns(growth)
    noise = max(NOISE, fixed.scatter)
    reason = batch_instead(fixed, growth)
    return estimate("time between tokens", max(low - noise, 0.0), expected, high + noise, reason)


def _alternatives(case: Case, fixed: FixedShare) -> tuple[RuledOut, ...]:
    why = []
    if fixed.is_known:
        why.append(
            RuledOut(
                "graph-miss",
                f"About {percent(1 - fixed.share)} of the time of a decode step grows with the "
                "batch. A missing graph adds the same time to every step.",
            )
        )
    if case.decoding.median(lambda moment: moment.queue):
        why.append(
            RuledOut("queue-too-long", "A queue delays the first token, not the tokens after it.")
        )
    return tuple(why)


CHECK = Check(
    cause="batch-too-large",
    title="The batch is too large for low latency",
    find=find,
    meaning="All running requests share every decode step, and each step gives each of them one "
    "token. The more requests run, the higher the output throughput, but the longer the time "
    "between the tokens of each request. If people read along or agents wait for the answers, that "
    "time may matter more.",
    rule="The median time between tokens is 100 ms or more (50 ms with --workload online) with at "
    "least 16 running requests, and, if the observed steps show it, most of a step's time depends "
    "on the size of the batch. Only metrics and Setpoint's own records contain latencies.",
    counter_evidence="A step that is slow even with a small batch means a slow device or a missing "
    "CUDA graph (graph-miss). Logs without latencies never lead to this finding.",
    advice="Lower --max-running-requests, with the value.",
    guide="SGLang's tuning guide of 2026, for online serving: keep batches small with "
    "--max-running-requests 128; if latency is high because the batch is too large, lower it, "
    "which trades throughput for latency.",
    equation="s = share of a step's time that does not grow with the batch, fitted to the observed "
    "steps; new limit = running x (target / time between tokens - s) / (1 - s)",
    picture="""\
time of a step |            .-'
               |        .-'     the same for each request
               |    .-'
             s |--'
               +------------------ running requests""",
)
