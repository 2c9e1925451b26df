"""client-bound: the server waits for requests."""

from __future__ import annotations

from setpoint.advisor.doctor.case import Case
from setpoint.advisor.doctor.checks.check import Check
from setpoint.advisor.doctor.checks.common import (
    confidence,
    per_minute,
    percent,
    quote,
    throughput_effect,
)
from setpoint.advisor.doctor.checks.kv_optimistic import retracts_often
from setpoint.advisor.doctor.equations import rounded
from setpoint.advisor.doctor.findings import Action, Finding, RuledOut
from setpoint.advisor.doctor.limits import FULL, at_cap
from setpoint.advisor.doctor.phases import running_of, waits

MIN_SHARE = 0.8
"""Share of the loaded time without a queue."""


def find(case: Case) -> Finding | None:
    if not case.has_load:
        return None
    known = case.load.where(lambda moment: moment.queue is not None)
    empty = known.where(lambda moment: not waits(moment) and not (moment.preparing or 0) >= 1)
    share = sum(empty.weights) / total if (total := sum(known.weights)) else 0.0
    usage = case.decoding.median(lambda moment: moment.usage)
    running = case.decoding.median(running_of)
    capped = case.decoding.share(lambda moment: at_cap(moment, case.limits))
    if share < MIN_SHARE or running is None or capped > 0.5:
        return None
    if (usage is not None and usage >= 0.8) or retracts_often(case):
        return None
    growth = FULL / max(usage, 0.01) if usage is not None else 2.0
    if case.limits.slots:
        growth = min(growth, case.limits.slots / max(running, 1.0))
    target = max(rounded(min(running * min(growth, 8.0), 4096)), int(running) + 1)
    used = "" if usage is None else f" and {percent(usage)} of the KV pool is used"
    return Finding(
        cause="client-bound",
        confidence=confidence(case, share, known),
        summary=f"The server waits for requests: the queue is empty in {percent(share)} of the "
        f"loaded time, while {running:.0f} requests run{used}.",
        evidence=quote(empty),
        action=Action(
            f"Let the clients keep about {target} requests open at the same time (today about "
            f"{running:.0f}); no option of the server will raise the throughput.",
            value=target,
        ),
        effect=throughput_effect(case, max(running, 1.0), target / max(running, 1.0)),
        ruled_out=_alternatives(case, capped, usage, share),
        risk="More requests at once make each of them slower: watch the time between tokens.",
        verify="#queue-req is above 0 most of the time, and gen throughput has risen.",
        falsify="The clients already have more requests open than #running-req shows: then "
        "something in front of the scheduler holds them back (a proxy, the tokenizer).",
        share=round(share, 3),
    )


def _alternatives(
    case: Case, capped: float, usage: float | None, share: float
) -> tuple[RuledOut, ...]:
    why = [RuledOut("seq-cap", f"Nothing waits in {percent(share)} of the time, so no cap binds.")]
    if case.limits.slots and not capped:
        why[0] = RuledOut(
            "seq-cap",
            f"At most {case.load.most(running_of):.0f} of {case.limits.slots:.0f} slots are used.",
        )
    if usage is not None:
        why.append(RuledOut("kv-full", f"The median usage is {usage:.2f}; the pool has room."))
    why.append(RuledOut("kv-optimistic", f"There are {per_minute(case)}."))
    return tuple(why)


CHECK = Check(
    cause="client-bound",
    title="The server waits for requests",
    find=find,
    meaning="The server computes everything that it gets at once and has room for more. The "
    "batch is as large as the clients make it, so the throughput is the clients' doing: a script "
    "that sends one request after the other, a small pool of connections, a load generator with "
    "a low concurrency or request rate, a proxy that limits connections. Options of the server "
    "change nothing about it.",
    rule="Under load (ramp and drain are left out) #queue-req is 0 in at least 80 % of the time, "
    "while the token usage is below 0.8 and the running requests are below their cap.",
    counter_evidence="The end of a benchmark looks the same: no queue, and ever fewer requests. "
    "It is told apart by admissions: after the last one, a falling number of running requests is "
    "a drain. Requests that wait for their grammar are not in the queue either; where their number "
    "is known, it is looked at. And a pool or a cap in full use without a queue is a good state.",
    guide="SGLang's tuning guides of all years: if #queue-req is 0 frequently, the clients submit "
    "too slowly; submit faster. The guides call a queue of 50 to 500 (2024) or 100 to 2000 "
    "(2025 and later) healthy.",
    equation="requests to keep open = running x 0.9 / usage, at most the cap of running requests "
    "and at most 8 times today's",
    picture="""\
clients . . . .        queue             running (room for 256)
  -> request ->  [              ] ->  [###........................]
                   always empty          12 run, usage 0.05""",
)
