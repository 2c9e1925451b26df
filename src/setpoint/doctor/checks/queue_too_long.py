"""queue-too-long: so many requests wait that handling the queue costs time."""

from __future__ import annotations

from setpoint.doctor.case import Case
from setpoint.doctor.checks.check import Check
from setpoint.doctor.checks.common import confidence, during, estimate, quote
from setpoint.doctor.equations import queue_limit
from setpoint.doctor.findings import Action, Finding, RuledOut

MOST = 2000
MIN_SHARE = 0.5
LPM_LIMIT = 128
"""SGLang's lpm acts as fcfs while more requests wait."""


def find(case: Case) -> Finding | None:
    long = case.load.where(lambda moment: (moment.queue or 0.0) > MOST)
    share = sum(long.weights) / (sum(case.load.weights) or 1.0)
    queue = long.median(lambda moment: moment.queue)
    if not case.has_load or share < MIN_SHARE or queue is None:
        return None
    running = case.decoding.median(lambda moment: moment.running) or 0.0
    value = queue_limit(running)
    policy = case.option("schedule_policy")
    sorting = (
        f" With more than {LPM_LIMIT} in the queue, --schedule-policy {policy} has no effect: "
        "requests are served in order of arrival."
        if policy in ("lpm", "hrrn")
        else ""
    )
    return Finding(
        cause="queue-too-long",
        confidence=confidence(case, share, long, 0.95),
        summary=f"The queue is too long: {during(share)}, more than {MOST:,} requests wait (median "
        f"{queue:,.0f}) while {running:,.0f} run.{sorting}",
        evidence=quote(long),
        action=Action(
            f"Set --max-queued-requests to {value}, so that further requests are refused at once "
            "(HTTP status 503) and their clients can try later or elsewhere. Otherwise, send fewer "
            "requests or add replicas.",
            "--max-queued-requests",
            "set",
            value,
            live=True,
        ),
        effect=estimate(
            "time in the queue",
            0.8 * value / queue,
            value / queue,
            min(1.2 * value / queue, 1.0),
            f"at the same throughput, the wait is proportional to the length of the queue, which "
            f"falls from {queue:,.0f} to at most {value:,}",
        ),
        ruled_out=(
            RuledOut(
                "healthy",
                f"The guides call a queue of up to {MOST:,} requests healthy; this one is longer.",
            ),
        ),
        risk="Requests are lost if their clients do not retry.",
        verify="The queue (#queue-req) stays at or below the limit, and the time to first token "
        "falls.",
        falsify="This is an offline batch whose requests all arrive at the start. Then a long "
        "queue does no harm, apart from the scheduler's time per step.",
        share=share,
    )


CHECK = Check(
    cause="queue-too-long",
    title="The queue is too long",
    find=find,
    meaning="More requests arrive than the server can compute, and it keeps all of them. Each "
    "request waits for all those before it, so many clients give up before their turn. The "
    "scheduler also spends time on the queue in every step, most of all with a policy that sorts "
    "it.",
    rule="More than 2,000 requests wait for at least half of the time under load.",
    counter_evidence="If the limit on running requests or the memory reserve keeps requests out, "
    "that cause comes first. In an offline batch, nobody waits for a single answer.",
    advice="Set --max-queued-requests, with the value; or send fewer requests, or add replicas.",
    guide="SGLang's tuning guide of 2024: keep #queue-req moderate, because a long queue raises "
    "the scheduling overhead, especially with --schedule-policy lpm; 50 to 500 is healthy. The "
    "guides of 2025 and 2026: 100 to 2000 is healthy; above 2000, send fewer requests.",
    equation="--max-queued-requests = 2 x running requests, between 100 and 2000. By Little's law, "
    "a request then waits about twice as long as it runs.",
    picture="""\
queue  [################################################## 5200 ]
                                            guides: at most 2000 ^
running  [#### 240 ]    a request waits 5200 / 240 = 22 times as long
                        as it runs""",
)
