"""client-bound: the server waits for requests."""

from __future__ import annotations

from setpoint.doctor.binding_limit import FULL, at_cap
from setpoint.doctor.case import Case
from setpoint.doctor.checks.check import Check
from setpoint.doctor.checks.common import (
    careful,
    confidence,
    counted,
    during,
    fixed_share_of,
    per_minute,
    percent,
    quote,
    throughput_effect,
)
from setpoint.doctor.checks.kv_optimistic import retracts_often
from setpoint.doctor.equations import rounded
from setpoint.doctor.findings import Action, Finding, RuledOut
from setpoint.doctor.phases import running_of, waits

MIN_SHARE = 0.8
"""Least share of the loaded time without a queue."""


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
    fixed = fixed_share_of(case, running)
    growth, again = careful(case, fixed, min(growth, 8.0))
    target = max(rounded(min(running * growth, 4096)), int(running) + 1)
    uses = "uses" if round(running) == 1 else "use"
    much = "less than 1 %" if usage is not None and usage < 0.005 else percent(usage or 0.0)
    used = "" if usage is None else f", which {uses} {much} of the KV pool"
    return Finding(
        cause="client-bound",
        confidence=confidence(case, share, known),
        summary=f"The server waits for requests: the queue is empty {during(share)}, with only "
        f"{counted(round(running), 'running request')}{used}.",
        evidence=quote(empty),
        action=Action(
            f"Have the clients keep about {target} requests open at once (now about "
            f"{running:.0f}). No option of the server will raise output throughput.{again}",
            value=target,
        ),
        effect=throughput_effect(fixed, target / fixed.running),
        ruled_out=_alternatives(case, capped, usage, share),
        risk="With more requests at once, each of them gets its tokens more slowly: watch the time "
        "between tokens.",
        verify="The queue (#queue-req) is above 0 most of the time, and output throughput (gen "
        "throughput) has risen.",
        falsify="The clients already have more requests open than the log shows as running "
        "(#running-req). Then something in front of the scheduler holds them back, such as a proxy "
        "or the tokenizer.",
        share=round(share, 3),
    )


def _alternatives(
    case: Case, capped: float, usage: float | None, share: float
) -> tuple[RuledOut, ...]:
    why = [
        RuledOut("seq-cap", f"No request waits {during(share)}, so no limit keeps requests out.")
    ]
    if case.limits.slots and not capped:
        most = counted(round(case.load.most(running_of) or 0.0), "request")
        why[0] = RuledOut(
            "seq-cap", f"At most {most} ran at once; the limit is {case.limits.slots:,.0f}."
        )
    if usage is not None:
        why.append(RuledOut("kv-full", f"Only {percent(usage)} of the KV pool is in use (median)."))
    why.append(RuledOut("kv-optimistic", f"There are {per_minute(case)}."))
    return tuple(why)


CHECK = Check(
    cause="client-bound",
    title="The server waits for requests",
    find=find,
    meaning="The server starts on each request as soon as it arrives and has room for more. The "
    "clients decide how many requests run at once, and so they decide the output throughput: a "
    "script that sends one request after the other, a small connection pool, a load generator "
    "with a low concurrency or request rate, or a proxy that limits connections. No option of the "
    "server changes that.",
    rule="Under load (ramp and drain excluded), the queue (#queue-req) is empty for at least 80 % "
    "of the time, while less than 80 % of the KV pool is in use and fewer requests run than the "
    "limit allows.",
    counter_evidence="At the end of a benchmark there is no queue either, and fewer and fewer "
    "requests run; the doctor recognizes it, because no new request is admitted. Requests that "
    "wait for a grammar are outside the queue; where their number is known, the doctor counts "
    "them as waiting. If the KV pool or the limit on running requests is fully used and the queue "
    "is empty, the server is well used.",
    advice="Have the clients keep more requests open at once; the report says how many. No option "
    "of the server helps.",
    guide="SGLang's tuning guides of all years: if #queue-req is often 0, the clients send too "
    "slowly; send faster. The guides call a queue of 50 to 500 (2024) or 100 to 2000 requests "
    "(2025 and later) healthy.",
    equation="requests to keep open = running requests x 0.9 / KV pool usage, but at most the "
    "limit on running requests, and at most 8 times today's. Where the observed steps do not tell "
    "what that gains: twice today's, or as many as the device serves while reading the weights "
    "takes most of a step",
    picture="""\
clients . . . .        queue             running (limit 256)
  -> request ->  [              ] ->  [###........................]
                   always empty       12 run, 5 % of the KV pool""",
)
