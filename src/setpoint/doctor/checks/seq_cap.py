"""seq-cap: the limit on running requests is reached, and others wait."""

from __future__ import annotations

import math

from setpoint.doctor.binding_limit import FULL, at_budget, at_cap, binding_limit
from setpoint.doctor.case import Case
from setpoint.doctor.checks.check import Check
from setpoint.doctor.checks.common import (
    acting,
    careful,
    change,
    confidence,
    during,
    events,
    fixed_share_of,
    lines_on,
    per_minute,
    percent,
    quote,
    quote_events,
    throughput_effect,
)
from setpoint.doctor.equations import rounded, running_for
from setpoint.doctor.findings import Action, Finding, RuledOut
from setpoint.doctor.observations import Evidence

MIN_SHARE = 0.4
"""Least share of the loaded time in which the cap binds."""

FEW = 0.05
"""With fewer waiting requests for each slot, another slot changes nothing."""


def find(case: Case) -> Finding | None:
    if not case.has_load or not case.limits.slots:
        return None
    capped = case.decoding.where(lambda moment: binding_limit(moment, case.limits) == "seq-cap")
    share = sum(capped.weights) / (sum(case.decoding.weights) or 1.0)
    usage = capped.median(lambda moment: moment.usage)
    if share < MIN_SHARE or (usage is not None and usage >= FULL):
        return None
    slots = case.limits.slots
    queue = capped.quantile(lambda moment: moment.queue, 0.9) or 1.0
    if queue < FEW * slots:
        return None
    waiting = capped.median(lambda moment: moment.queue) or queue
    tokens = capped.median(lambda moment: moment.tokens)
    value = running_for(
        slots,
        FULL / 2 if usage is None else usage,
        case.facts.max_total_num_tokens,
        tokens / slots if tokens else None,
    )
    fixed = fixed_share_of(case, slots)
    growth, again = careful(case, fixed, value / slots)
    # A moment's queue can be a mean; the 7 leave the sum its next multiple of 8.
    value = max(
        min(value, rounded(slots * growth), rounded(slots + math.ceil(queue) + 7)), int(slots) + 1
    )
    used = "" if usage is None else f", while only {percent(usage)} of the KV pool is in use"
    return Finding(
        cause="seq-cap",
        confidence=confidence(case, share, capped, 0.97 if case.slots_named else 0.85),
        summary=f"The limit on running requests is reached: {during(share)}, "
        f"{acting(slots, 'request', 'run')} (the limit) and about "
        f"{acting(waiting, 'request', 'wait')}{used}.",
        evidence=_evidence(case) + quote(capped),
        action=_action(case, value, again),
        effect=throughput_effect(fixed, value / slots),
        ruled_out=_alternatives(case, usage),
        risk="With more requests at once, each of them gets its tokens more slowly. Decode graphs "
        "cover batches only up to the largest captured size (see graph-miss).",
        verify=f"Under the same load, the running requests (#running-req) rise above {slots:.0f}, "
        "KV pool usage (token usage) rises, and the queue (#queue-req) shrinks.",
        falsify="The running requests (#running-req) stay where they are although the ready line "
        "(max_total_num_tokens=…) shows the new limit.",
        share=round(share, 3),
    )


def _evidence(case: Case) -> tuple[Evidence, ...]:
    if case.slots_named:
        return lines_on(case, "max_running_requests") + quote_events(case, "reduced", 1)
    return ()


def _reduced(case: Case) -> bool:
    """Whether the server lowered the option's value when it started."""
    asked, given = case.number("max_running_requests"), case.facts.max_running_requests
    parts = case.number("attn_dp_size") or case.number("dp_size") or 1
    if asked and given and given < asked // max(parts, 1):
        return True
    return bool(events(case, "reduced"))


def _action(case: Case, value: int, again: str) -> Action:
    text = change("increase", "--max-running-requests", value, case.limits.slots) + "." + again
    if not case.slots_named:
        text += (
            " No line that was read names the limit: check max_running_requests in the server's "
            "ready line (max_total_num_tokens=…) first."
        )
    if _reduced(case):
        text += (
            " At its start, the server lowered the value that it was given, because its memory "
            "does not hold the states of that many requests. If it does so again, raise "
            "--mem-fraction-static or lower --context-length."
        )
    # This needs a restart: the engine has as many slots as the cap had at its start.
    return Action(text, "--max-running-requests", "increase", value)


def _alternatives(case: Case, usage: float | None) -> tuple[RuledOut, ...]:
    why = []
    if usage is not None:
        why.append(
            RuledOut(
                "kv-full", f"At the limit, {percent(usage)} of the KV pool is in use (median)."
            )
        )
    at = case.queued().share(lambda moment: at_cap(moment, case.limits))
    why.append(
        RuledOut(
            "kv-conservative",
            f"While requests wait, as many run as the limit allows for {percent(at)} of the time. "
            "If the memory reserve kept requests out, their number would vary below the limit.",
        )
    )
    full = case.load.share(lambda moment: at_budget(moment, case.limits))
    why.append(
        RuledOut(
            "prefill-budget",
            f"Prefill batches that fill their token budget take {percent(full)} of the time.",
        )
    )
    why.append(RuledOut("kv-optimistic", f"There are {per_minute(case)}."))
    return tuple(why)


CHECK = Check(
    cause="seq-cap",
    title="The limit on running requests is reached",
    find=find,
    meaning="The server runs at most --max-running-requests requests at once. (With attention data "
    "parallelism, the limit is divided among the ranks; at its start, the server lowers it if "
    "memory does not hold the states of that many requests.) The limit is reached, more requests "
    "wait, and the KV pool has room that none of them may use. The guides' rule 'token usage below "
    "0.9 and a queue: lower --schedule-conservativeness' seems to fit, but would change nothing: "
    "the memory reserve is not what keeps requests out.",
    rule="For at least 40 % of the time under load, requests wait while as many run as the limit "
    "allows and less than 90 % of the KV pool is in use. The limit is the one in the ready line "
    "(max_total_num_tokens=…), or else the option. If neither is known, it is the number of "
    "running requests that was seen in 70 % of the moments with a queue. Setpoint's own records "
    "name the reason (no_slot).",
    counter_evidence="If 90 % or more of the KV pool is in use at the limit, a higher limit gains "
    "nothing: the pool would stop the next request. A server at its limit without a queue is "
    "fine. A number that was only seen is no limit if prefill batches beside a nearly full pool "
    "(85 %) leave requests in the queue although fewer run: the next one did not fit into memory.",
    advice="Raise --max-running-requests, with the value.",
    guide="SGLang's tuning guide of 2026: under load, #running-req should be close to "
    "--max-running-requests; it suggests 4096 for offline batches and 128 for low latency. The "
    "older guides name the option only as a remedy when decode runs out of memory. sglang#30160 "
    "shows that the limit may be lower than the value that was asked for.",
    equation="new limit = limit x 0.9 / KV pool usage, but at most pool size / tokens per request, "
    "and at most limit + waiting requests. Where the observed steps do not tell what that gains: "
    "at most twice the limit, or the batch whose work takes as long as reading the weights",
    picture="""\
queue               running, limit 64           KV pool
[########### 310 ]  [############] 64 of 64     [#####.......] 41 %
                    no slot is free             most of it is free""",
)
