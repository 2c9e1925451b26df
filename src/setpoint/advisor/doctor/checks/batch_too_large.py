"""batch-too-large: tokens come slowly because too many requests share each step."""

from __future__ import annotations

from setpoint.advisor.doctor.case import Case
from setpoint.advisor.doctor.checks.check import Check
from setpoint.advisor.doctor.checks.common import confidence, estimate, quote, step_time
from setpoint.advisor.doctor.equations import rounded
from setpoint.advisor.doctor.findings import Action, Effect, Finding, RuledOut
from setpoint.advisor.doctor.step_times import StepTime
from setpoint.observe.moments import Moment

SLOW_S = 0.1
"""Time between tokens that readers notice: ten tokens a second."""
ONLINE_S = 0.05
"""… for a server that is set up for low latency."""
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
    fitted = step_time(case)
    if fitted is not None and fitted.per_request * running < fitted.base:
        return None  # the step is slow with any batch
    value = max(_running_for(target, latency, running, fitted), 1)
    if value >= running:
        return None
    return Finding(
        cause="batch-too-large",
        confidence=confidence(case, 0.9 if fitted else 0.6, measured, 0.9 if fitted else 0.75),
        summary=f"The batch is too large for low latency: with {running:,.0f} running requests, "
        f"the time between two tokens of a request is {1000 * latency:,.0f} ms (median).",
        evidence=quote(measured),
        action=Action(
            f"Lower --max-running-requests to {value}; further requests then wait in the queue.",
            "--max-running-requests",
            "decrease",
            value,
            live=True,
        ),
        effect=_effect(latency, running, value, fitted),
        ruled_out=_alternatives(case, fitted, running),
        risk="With fewer requests at once, output throughput falls and requests wait longer for "
        "their first token.",
        verify=f"The median time between tokens falls to about {1000 * target:.0f} ms.",
        falsify="The time between tokens stays the same with fewer running requests. Then prefill "
        "between the decode steps, or the device itself, is what is slow.",
        share=round(measured.share(lambda m: (_between_tokens(m) or 0.0) >= target), 3),
    )


def _between_tokens(moment: Moment) -> float | None:
    return moment.quantiles.get("itl_p50")


def _running_for(target: float, latency: float, running: float, fitted: StepTime | None) -> int:
    if fitted is not None and fitted.per_request > 0 and fitted.base < target:
        return rounded((target - fitted.base) / fitted.per_request)
    return rounded(running * target / latency)


def _effect(latency: float, running: float, value: int, fitted: StepTime | None) -> Effect:
    least = value / running
    if fitted is None:
        why = (
            f"{value:,} instead of {running:,.0f} requests run; at best, the time falls in "
            "proportion"
        )
        return estimate("time between tokens", least, (1 + least) / 2, 1.0, why)
    after = fitted.base + fitted.per_request * value
    expected = min(after / (fitted.base + fitted.per_request * running), 1.0)
    why = (
        f"a decode step takes {1000 * fitted.base:.1f} ms plus {1000 * fitted.per_request:.3g} ms "
        f"for each running request (fitted to {fitted.num_points} observed batches)"
    )
    return estimate("time between tokens", least, expected, 1.0, why)


def _alternatives(case: Case, fitted: StepTime | None, running: float) -> tuple[RuledOut, ...]:
    why = []
    if fitted is not None:
        why.append(
            RuledOut(
                "graph-miss",
                f"Only {1000 * fitted.base:.1f} ms of a decode step do not depend on the size of "
                f"the batch; {1000 * fitted.per_request * running:.1f} ms do.",
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
    guide="SGLang's tuning guide of 2026, for online serving: keep batches small with "
    "--max-running-requests 128; if latency is high because the batch is too large, lower it, "
    "which trades throughput for latency.",
    equation="step time = a + b x running requests, fitted to the observed steps; new limit = "
    "(target - a) / b",
    picture="""\
time of a step |            .-'
               |        .-'     b for each request
               |    .-'
             a |--'
               +------------------ running requests""",
)
