"""seq-cap: as many requests run as may run, and others wait."""

from __future__ import annotations

from setpoint.advisor.doctor.case import Case
from setpoint.advisor.doctor.checks.check import Check
from setpoint.advisor.doctor.checks.common import (
    confidence,
    events,
    per_minute,
    percent,
    quote,
    quote_events,
    said,
    throughput_effect,
)
from setpoint.advisor.doctor.equations import rounded, running_for
from setpoint.advisor.doctor.findings import Action, Finding, RuledOut
from setpoint.advisor.doctor.limits import FULL, at_budget, binding_limit
from setpoint.advisor.doctor.observations import Evidence
from setpoint.advisor.doctor.phases import running_of

MIN_SHARE = 0.4
"""Share of the loaded time in which the cap binds."""

FEW = 0.05
"""Waiting requests for each slot below which another slot changes nothing."""


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
    tokens = capped.median(lambda moment: moment.tokens)
    value = running_for(
        slots,
        FULL / 2 if usage is None else usage,
        case.facts.max_total_num_tokens,
        tokens / slots if tokens else None,
    )
    value = max(min(value, rounded(slots + queue + 7)), int(slots) + 1)
    used = "" if usage is None else f", with {percent(usage)} of the KV pool in use"
    return Finding(
        cause="seq-cap",
        confidence=confidence(case, share, capped, 0.97 if case.slots_named else 0.85),
        summary=f"The cap of running requests binds: {slots:.0f} run in {percent(share)} of the "
        f"loaded time while about {capped.median(lambda m: m.queue):.0f} wait{used}.",
        evidence=_evidence(case) + quote(capped),
        action=_action(case, value),
        effect=throughput_effect(case, slots, value / slots),
        ruled_out=_alternatives(case, usage),
        risk="More requests at once make each of them slower between tokens, and decode graphs "
        "cover batches only up to their largest size (see graph-miss).",
        verify="#running-req rises above the old cap, usage rises, #queue-req falls.",
        falsify="#running-req stays where it is although the ready line shows the new cap.",
        share=round(share, 3),
    )


def _evidence(case: Case) -> tuple[Evidence, ...]:
    if case.slots_named:
        return said(case, "max_running_requests") + quote_events(case, "reduced", 1)
    return ()


def _reduced(case: Case) -> bool:
    """The server lowered the option's value when it started."""
    asked, given = case.number("max_running_requests"), case.facts.max_running_requests
    parts = case.number("attn_dp_size") or case.number("dp_size") or 1
    if asked and given and given < asked // max(parts, 1):
        return True
    return bool(events(case, "reduced"))


def _action(case: Case, value: int) -> Action:
    text = f"Start the server with --max-running-requests {value}."
    if not case.slots_named:
        text += " The source does not show the cap; look for it in the ready line first."
    if _reduced(case):
        text += (
            " The server lowered the value that it was given when it started, because its memory "
            "does not hold the states of so many requests: if it does so again, give it more with "
            "--mem-fraction-static, or lower --context-length."
        )
    # Not while it serves: the engine has as many slots as the cap had at its start.
    return Action(text, "--max-running-requests", "increase", value)


def _alternatives(case: Case, usage: float | None) -> tuple[RuledOut, ...]:
    why = []
    if usage is not None:
        why.append(
            RuledOut("kv-full", f"The median usage at the cap is {usage:.2f}: room is left.")
        )
    running = [running_of(moment) for moment in case.queued().moments]
    same = len({value for value in running if value is not None})
    take = "have one number" if same == 1 else f"take {same} different values"
    why.append(
        RuledOut(
            "kv-conservative",
            f"While requests wait, the running ones {take}, at most the cap; "
            "a reserve that binds lets their number vary.",
        )
    )
    full = case.load.share(lambda moment: at_budget(moment, case.limits))
    why.append(
        RuledOut("prefill-budget", f"Prefill batches at their budget make {percent(full)} of it.")
    )
    why.append(RuledOut("kv-optimistic", f"There are {per_minute(case)}."))
    return tuple(why)


CHECK = Check(
    cause="seq-cap",
    title="The cap of running requests binds",
    find=find,
    meaning="The server runs at most --max-running-requests requests together (divided by the "
    "ranks of attention data parallelism, and lowered at the start if memory does not hold the "
    "states of so many). All of them run, others wait, and the KV pool has room that nobody may "
    "use. The guides' rule 'usage below 0.9 and a queue: lower --schedule-conservativeness' fits "
    "the picture and does nothing: the reserve is not what stops admission.",
    rule="In at least 40 % of the loaded time requests wait while the running ones are at the cap "
    "and usage is below 0.9. The cap is that of the ready line, else the option; if neither is "
    "there, a number at which the running requests stand in 70 % of the moments with a queue. "
    "Setpoint's own records name the reason (no_slot).",
    counter_evidence="A cap that is reached at a usage of 0.9 or more costs nothing: the pool "
    "would bind next. Requests at the cap without a queue are a good state.",
    guide="SGLang's tuning guide, 2026: #running-req should be close to --max-running-requests "
    "under load; for offline batches it suggests 4096, for low latency 128. The older guides name "
    "the option only as a remedy for memory that runs out in decode. That the cap may be lower "
    "than what was asked for is sglang#30160.",
    equation="value = cap x 0.9 / usage, at most pool / tokens per request, "
    "at most cap + waiting requests",
    picture="""\
queue               running, cap 64             KV pool
[########### 310 ]  [############] 64 of 64     [#####.......] 0.41
                    no slot is free             much is free""",
)
