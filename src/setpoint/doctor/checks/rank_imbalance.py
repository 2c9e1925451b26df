"""rank-imbalance: requests wait at one rank while another has nothing to do."""

from __future__ import annotations

from setpoint.doctor.case import MIN_LINES, Case
from setpoint.doctor.checks.check import Check
from setpoint.doctor.checks.common import (
    acting,
    confidence,
    estimate,
    quote,
)
from setpoint.doctor.findings import Action, Finding, RuledOut
from setpoint.doctor.load import Load
from setpoint.doctor.phases import waits

MIN_QUEUE = 4.0
MIN_QUEUE_OF_FEW = 10.0
"""If a rank has only a line or two: what arrives in a burst would soon be gone."""
FEW_LINES = 5
"""Lines of a rank in the mean, below which one may have no more than a line or two."""
MIN_QUEUED = 0.5
LESS = 0.25
"""The idle rank has at most this share of the busy rank's queue …"""
FEWER = 0.75
"""… and of its running requests."""


def find(case: Case) -> Finding | None:
    few = MIN_LINES if len(case.load) >= FEW_LINES * len(case.loads) else 1
    loads = {name: load for name, load in case.loads.items() if len(load) >= few}
    if len(loads) < 2 or not case.has_load:
        return None
    busy = max(loads, key=lambda name: _queue(loads[name]))
    idle = min(loads, key=lambda name: (_queue(loads[name]), _running(loads[name])))
    queue, rest = _queue(loads[busy]), _queue(loads[idle])
    share = loads[busy].share(waits)
    least = MIN_QUEUE_OF_FEW if len(loads[busy]) < MIN_LINES else MIN_QUEUE
    if queue < least or share < MIN_QUEUED or rest > LESS * queue:
        return None
    if _running(loads[idle]) > FEWER * _running(loads[busy]):
        return None
    lengths = ", ".join(f"{name or 'rank'}: {_queue(load):.0f}" for name, load in loads.items())
    mean = sum(_queue(load) for load in loads.values()) / len(loads)
    return Finding(
        cause="rank-imbalance",
        confidence=confidence(case, share, loads[busy], 0.9),
        summary=f"Requests wait at one rank while another has room: on average, {queue:,.0f} wait "
        f"at {busy} but {rest:,.0f} at {idle}, where {_running(loads[idle]):,.0f} run.",
        evidence=quote(loads[busy], 2) + quote(loads[idle], 2),
        action=_action(case),
        effect=estimate(
            "time in the queue of the busiest rank",
            0.0,
            mean / queue,
            1.0,
            f"on average, these numbers of requests wait: {lengths}; spread evenly, {mean:,.0f} "
            "would wait at each rank",
        ),
        ruled_out=(
            RuledOut(
                "client-bound",
                f"The clients send enough: {acting(queue, 'request', 'wait')} at {busy}.",
            ),
        ),
        risk="Balancing by load may send a request to a rank that does not have its prefix in the "
        "cache.",
        verify="The ranks' queues (#queue-req) have similar lengths.",
        falsify="The requests name their rank or session themselves. Then the clients distribute "
        "them.",
        share=share,
    )


def _queue(load: Load) -> float:
    return load.mean(lambda moment: moment.queue) or 0.0


def _running(load: Load) -> float:
    return load.mean(lambda moment: moment.running) or 0.0


def _action(case: Case) -> Action:
    """The change of --load-balance-method, whose values were renamed: old servers have
    shortest_queue."""
    known = case.option("load_balance_method")
    if known in ("total_requests", "total_tokens", "shortest_queue", "minimum_tokens"):
        return Action(
            "Check what distributes the requests in front of the ranks. The server itself already "
            f"balances by load (--load-balance-method {known})."
        )
    return Action(
        "Set --load-balance-method to total_requests (shortest_queue in older versions), or put a "
        "router in front that balances by load.",
        "--load-balance-method",
        "set",
        "total_requests",
    )


CHECK = Check(
    cause="rank-imbalance",
    title="Requests wait at one rank while another has room",
    find=find,
    meaning="With data parallelism, each rank has its own queue and KV pool. If requests are "
    "distributed in turn, or only by prefix, one rank may get the long ones: requests wait there "
    "while other ranks have room. The busy rank's own lines show which limit it has reached.",
    rule="At one rank, requests wait for at least half of the time under load (4 or more on "
    "average). At another rank, at most a quarter as many wait, and at most three quarters as many "
    "run. If there are only a line or two of each rank, 10 or more must wait at the busy one.",
    counter_evidence="Ranks of tensor parallelism log the same batches, or only the first one logs "
    "at all, so they show no difference.",
    advice="Set --load-balance-method total_requests, or put a router in front that balances "
    "by load.",
    guide="SGLang's tuning guides of 2025 and 2026: for data parallelism, use the router (model "
    "gateway) rather than --dp-size; it distributes requests by load and by cached prefix.",
    picture="""\
DP0  queue [########## 80 ]  running [########]
DP1  queue [            0 ]  running [##      ]""",
)
