"""queue-too-long: so many requests wait that handling them costs time."""

from __future__ import annotations

from setpoint.advisor.doctor.case import Case
from setpoint.advisor.doctor.checks.check import Check
from setpoint.advisor.doctor.checks.common import confidence, estimate, percent, quote
from setpoint.advisor.doctor.equations import queue_limit
from setpoint.advisor.doctor.findings import Action, Finding, RuledOut

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
    usage = case.decoding.median(lambda moment: moment.usage)
    policy = case.option("schedule_policy")
    sorting = (
        f" The policy {policy} acts as first come, first served while more than {LPM_LIMIT} wait."
        if policy in ("lpm", "hrrn")
        else ""
    )
    return Finding(
        cause="queue-too-long",
        confidence=confidence(case, share, long, 0.95),
        summary=f"The queue is too long: more than {MOST} requests wait in {percent(share)} of the "
        f"loaded time (median {queue:.0f}), while {running:.0f} run.{sorting}",
        evidence=quote(long),
        action=Action(
            f"Start the server with --max-queued-requests {value}, so that clients are told at "
            "once (status 503) to come back or to go to another replica, or let them send fewer.",
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
            f"at the same rate of service the wait is proportional to the queue: {queue:.0f} -> "
            f"{value}",
        ),
        ruled_out=(
            RuledOut(
                "healthy",
                f"Usage is {'unknown' if usage is None else format(usage, '.2f')}, but the guides' "
                f"upper bound for a queue is {MOST}.",
            ),
        ),
        risk="Clients that do not try again lose requests.",
        verify="#queue-req stays below the limit, and the time to the first token falls.",
        falsify="The requests of an offline batch may all wait from the start: then nobody is "
        "hurt by a long queue, and only the scheduler's time per step counts.",
        share=share,
    )


CHECK = Check(
    cause="queue-too-long",
    title="Too many requests wait",
    find=find,
    meaning="More arrives than the server can do, and everything that arrives is kept. Each "
    "request waits for all those before it, most clients give up before their turn, and the "
    "scheduler spends time on the queue in each step, most of all with policies that sort it.",
    rule="More than 2000 requests wait in at least half of the loaded time.",
    counter_evidence="If the requests do not run because of a cap or a reserve, that is the cause, "
    "and comes first. In an offline batch nobody waits for a single answer.",
    guide="SGLang's tuning guide, 2024: do not make #queue-req too large, because it raises the "
    "scheduling overhead, especially with --schedule-policy lpm; healthy is 50 to 500. The guides "
    "of 2025 and 2026: healthy is 100 to 2000; above 2000 reduce the rate of requests.",
    equation="--max-queued-requests = 2 x running requests, between 100 and 2000: by Little's law "
    "a request then waits about twice as long as it is served.",
    picture="""\
queue  [################################################## 5200 ]
                                            guides: at most 2000 ^
running  [#### 240 ]    a request waits 5200 / 240 = 22 times as long
                        as it is served""",
)
