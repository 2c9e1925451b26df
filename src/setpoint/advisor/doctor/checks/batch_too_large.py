"""batch-too-large: tokens come slowly because too many requests share each step."""

from __future__ import annotations

from setpoint.advisor.doctor.case import Case
from setpoint.advisor.doctor.checks.check import Check
from setpoint.advisor.doctor.checks.common import confidence, estimate, quote, step_time
from setpoint.advisor.doctor.equations import StepTime, rounded
from setpoint.advisor.doctor.findings import Action, Effect, Finding, RuledOut
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
        summary=f"Tokens come slowly because the batch is large: {1000 * latency:.0f} ms between "
        f"two tokens of a request (median) with {running:.0f} running requests.",
        evidence=quote(measured),
        action=Action(
            f"Start the server with --max-running-requests {value}; the others wait in the queue.",
            "--max-running-requests",
            "decrease",
            value,
            live=True,
        ),
        effect=_effect(latency, running, value, fitted),
        ruled_out=_alternatives(case, fitted, running),
        risk="Fewer requests at once give less throughput, and a longer wait for the first token.",
        verify="The median time between tokens falls to the target.",
        falsify="It stays as it is with fewer running requests: then prefills in between, or the "
        "device itself, are what is slow.",
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
        why = f"{running:.0f} -> {value} running requests; in proportion at best"
        return estimate("time between tokens", least, (1 + least) / 2, 1.0, why)
    after = fitted.base + fitted.per_request * value
    expected = min(after / (fitted.base + fitted.per_request * running), 1.0)
    why = (
        f"{1000 * fitted.base:.1f} ms + {1000 * fitted.per_request:.3f} ms x running, fitted to "
        f"{fitted.num_points} moments of this source"
    )
    return estimate("time between tokens", least, expected, 1.0, why)


def _alternatives(case: Case, fitted: StepTime | None, running: float) -> tuple[RuledOut, ...]:
    why = []
    if fitted is not None:
        why.append(
            RuledOut(
                "graph-miss",
                f"Of a step, {1000 * fitted.base:.1f} ms do not depend on the batch, and "
                f"{1000 * fitted.per_request * running:.1f} ms do.",
            )
        )
    if case.decoding.median(lambda moment: moment.queue):
        why.append(
            RuledOut("queue-too-long", "A queue delays the first token, not those that follow it.")
        )
    return tuple(why)


CHECK = Check(
    cause="batch-too-large",
    title="Tokens come slowly because the batch is large",
    find=find,
    meaning="All running requests share each step, and each step gives each of them one token. "
    "More of them raise the throughput of the server and the time between the tokens of each. "
    "For people who read along, or for agents that wait, the second may matter more.",
    rule="Only from latencies (metrics or a live server): the median time between tokens is 100 ms "
    "or more (50 ms with --workload online) with at least 16 running requests, and where the "
    "source's own steps tell, most of a step depends on the batch.",
    counter_evidence="A slow step with a small batch is a slow device, or a decode graph that is "
    "missing. Logs of throughput alone show no latency that anyone complained of: nothing is found "
    "in them.",
    guide="SGLang's tuning guide, 2026, for online serving: keep batches small with "
    "--max-running-requests 128, and if latency is high because the batch is too large, lower "
    "it and trade throughput for latency.",
    equation="step time = a + b x running, fitted to the source; running = (target - a) / b",
    picture="""\
time of a step |            .-'
               |        .-'     b for each request
               |    .-'
             a |--'
               +------------------ running requests""",
)
