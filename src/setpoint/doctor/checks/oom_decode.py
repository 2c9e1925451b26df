"""oom-decode: memory runs out while tokens are generated."""

from __future__ import annotations

from setpoint.doctor.case import Case
from setpoint.doctor.checks.check import Check
from setpoint.doctor.checks.common import change, counted, once, said
from setpoint.doctor.checks.memory import first_oom, lower_fraction, tried_gb
from setpoint.doctor.equations import rounded
from setpoint.doctor.findings import Action, Finding, RuledOut
from setpoint.doctor.observations import Event, Evidence

FEW = 8
"""With so few running requests a cap would not help: the pool must give memory back."""
LESS = 0.8
"""Share of the running requests that may run after the change."""


def find(case: Case) -> Finding | None:
    found = first_oom(case, "decode", "unknown")
    if found is None:
        return None
    event, allocation = found
    ran = _running_before(case, event)
    running = "" if ran is None else f" for {counted(round(ran), 'running request')}"
    located = event.values.get("where") == "decode"
    action = _action(case, event, ran)
    return Finding(
        cause="oom-decode",
        confidence=0.95 if located else 0.7,
        summary=f"Memory runs out during decode: {allocation} failed while the server generated "
        f"tokens{running}.",
        evidence=once(
            (
                Evidence(event.line, event.text),
                *_last_line(case, event),
                *said(case, "available_gb"),
            )
        ),
        action=action,
        ruled_out=(
            RuledOut("oom-init", "The server had been ready or had run batches before."),
            RuledOut("oom-prefill", "The traceback or the last batch line shows a decode step."),
        ),
        risk="Fewer requests run at once, and more wait in the queue."
        if action.flag == "--max-running-requests"
        else "The KV pool gets smaller, so fewer requests run at once.",
        verify="Under the load that failed, no allocation fails and #running-req stays within the "
        "new limit."
        if action.flag == "--max-running-requests"
        else "Under the load that failed, no allocation fails.",
        falsify="The same error comes back with fewer running requests. Then the memory goes to "
        "something that does not depend on their number, such as another process on the device.",
        share=1.0,
    )


def _running_before(case: Case, event: Event) -> float | None:
    """Running requests in the last decode line before the error, or in the largest one."""
    moments = [moment for rank in case.ranks for moment in rank.moments if moment.num_decode]
    before = [moment for moment in moments if moment.line < event.line] or moments
    if not before:
        return None
    return max(before, key=lambda moment: moment.line).running_max


def _last_line(case: Case, event: Event) -> tuple[Evidence, ...]:
    moments = [
        moment
        for rank in case.ranks
        for moment in rank.moments
        if moment.num_decode and moment.line < event.line
    ]
    last = max(moments, key=lambda moment: moment.line, default=None)
    return (Evidence(last.line, last.text),) if last is not None else ()


def _action(case: Case, event: Event, ran: float | None) -> Action:
    if ran is not None and ran > FEW:
        value = max(rounded(ran * LESS), 1)
        return Action(
            f"{change('decrease', '--max-running-requests', value)}: {ran:,.0f} running requests "
            "were too many. If that costs too much output throughput, lower --mem-fraction-static "
            "instead.",
            "--max-running-requests",
            "decrease",
            value,
            live=True,
        )
    if ran is None:
        slots = case.facts.max_running_requests
        lower = rounded(slots / 2) if slots and slots > FEW else None
        return Action(
            "Lower --max-running-requests" + (f", for example to {lower}." if lower else "."),
            "--max-running-requests",
            "decrease",
            lower,
            live=True,
        )
    return lower_fraction(
        case,
        (tried_gb(event) or 1.0) + 2.0,
        f": only {counted(round(ran), 'running request')} used the memory, so the KV pool must "
        "leave more of it free.",
    )


CHECK = Check(
    cause="oom-decode",
    title="Memory runs out during decode",
    find=find,
    meaning="A decode step needs memory outside the KV pool for activations, logits and the "
    "sampler's copies of the logits, all in proportion to the running requests. (With a vocabulary "
    "of 150,000 tokens, the logits of one request take 0.6 MB in 32-bit floats.) With enough "
    "running requests, that is more than was left free.",
    rule="A memory allocation failed after the server was ready or had run batches, and the "
    "traceback shows a decode step. Without a traceback, the last batch line before it decides.",
    counter_evidence="The messages 'decode out of memory happened' and 'KV cache pool is full. "
    "Retract requests.' are not failed allocations: the KV pool was full, and the scheduler sent "
    "requests back to the queue (kv-optimistic).",
    guide="All guides: if decode runs out of memory, lower --max-running-requests; lowering "
    "--mem-fraction-static helps both prefill and decode.",
    equation="new limit = 0.8 x the running requests before the error. With 8 or fewer: "
    "--mem-fraction-static - (failed allocation + 2 GB) / memory of the device",
    picture="""\
decode of 233 requests   [######################]##  more than is free
decode of 184 requests   [#################.....]""",
)
