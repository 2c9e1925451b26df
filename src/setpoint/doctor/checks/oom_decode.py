"""oom-decode: memory runs out while tokens are generated."""

from __future__ import annotations

from setpoint.doctor.case import Case
from setpoint.doctor.checks.check import Check
from setpoint.doctor.checks.common import change, counted, lines_on, once
from setpoint.doctor.checks.memory import (
    first_oom,
    larger_workspace,
    last_decode,
    lower_fraction,
    running_before,
    tried_gb,
)
from setpoint.doctor.equations import rounded
from setpoint.doctor.findings import Action, Finding, RuledOut
from setpoint.doctor.observations import Event, Evidence

FEW = 8
"""With so few running requests a cap would not help; the pool must get smaller."""
LESS = 0.8
"""The new limit, as a share of the running requests before the error."""


def find(case: Case) -> Finding | None:
    found = first_oom(case, "decode")
    if found is None:
        return None
    event, allocation = found
    ran = running_before(case, event)
    running = "" if ran is None else f" for {counted(round(ran), 'running request')}"
    action = _of_pool(case) if event.values.get("pool") else _action(case, event, ran)
    last = last_decode(case, event)
    return Finding(
        cause="oom-decode",
        confidence=0.6 if event.values.get("by") == "order" else 0.95,
        summary="Memory runs out during decode: "
        + (
            f"the KV pool had no tokens left for the next step{running}."
            if event.values.get("pool")
            else f"{allocation} failed while the server generated tokens{running}."
        ),
        evidence=once(
            (
                Evidence(event.line, event.text),
                *(() if last is None else (Evidence(last.line, last.text),)),
                *lines_on(case, "available_gb"),
            )
        ),
        action=action,
        ruled_out=_alternatives(event),
        risk="Fewer requests run at once, and more wait in the queue."
        if action.flag == "--max-running-requests"
        else "Longer requests are refused."
        if action.flag == "--context-length"
        else "The KV pool gets smaller, so fewer requests run at once.",
        verify="Under the load that failed, no allocation fails and #running-req stays within the "
        "new limit."
        if action.flag == "--max-running-requests"
        else "Under the load that failed, no allocation fails.",
        falsify="The same error comes back with fewer running requests. Then the memory goes to "
        "something that does not depend on their number, such as another process on the device.",
        share=1.0,
    )


def _alternatives(event: Event) -> tuple[RuledOut, ...]:
    shown = {
        "order": "The last batch line before the error is about decode. That is a weak sign: a "
        "prefill that fails may leave no line.",
        "message": "The message names the decode step.",
    }.get(str(event.values.get("by")), "The traceback shows a decode step or the sampler.")
    return (
        RuledOut("oom-init", "The server had been ready or had run batches before."),
        RuledOut("oom-prefill", shown),
    )


def _of_pool(case: Case) -> Action:
    """The action if the pool has too few tokens, while the device has memory: one request is longer
    than the pool, or too many run and none can be retracted."""
    tokens, context = case.facts.max_total_num_tokens, case.facts.context_len
    if tokens and context and context > tokens:
        return Action(
            f"Lower --context-length to {tokens}: the KV pool holds no more tokens, so a longer "
            "request can never end. Longer ones are then refused when they arrive.",
            "--context-length",
            "decrease",
            tokens,
        )
    ran = case.decoding.most(lambda moment: moment.running)
    if ran is not None and ran > FEW:
        value = max(rounded(ran * LESS), 1)
        return Action(
            f"{change('decrease', '--max-running-requests', value)}: {ran:,.0f} running requests "
            "used up the KV pool.",
            "--max-running-requests",
            "decrease",
            value,
            live=True,
        )
    return Action(
        "Have the clients send shorter prompts or a smaller max_new_tokens: a few long requests "
        "use up the KV pool."
    )


def _action(case: Case, event: Event, ran: float | None) -> Action:
    if event.values.get("workspace"):
        return larger_workspace("--max-running-requests")
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
    "message or its traceback shows a decode step or the sampler. Without a traceback, the last "
    "batch line before it decides, unless the allocation is larger than what a decode step asks "
    "for (10 MiB for each running request) and a prefill may have asked for it; the doctor is then "
    "less sure. (Servers of 2024 and 2025 wrote the line of a prefill before its step, so there it "
    "can only be the last one.)",
    counter_evidence="The messages 'decode out of memory happened' and 'KV cache pool is full. "
    "Retract requests.' are not failed allocations: the KV pool was full, and the scheduler sent "
    "requests back to the queue (kv-optimistic). An error after which the server goes on for more "
    "than 30 s does not count.",
    advice="Lower --max-running-requests; with few running requests, lower "
    "--mem-fraction-static; if the KV pool itself was used up, lower --context-length "
    "or ask for shorter requests.",
    guide="All guides: if decode runs out of memory, lower --max-running-requests; lowering "
    "--mem-fraction-static helps both prefill and decode.",
    equation="new limit = 0.8 x the running requests before the error. With 8 or fewer: "
    "--mem-fraction-static - (failed allocation + 2 GB) / memory of the device",
    picture="""\
decode of 233 requests   [######################]##  more than is free
decode of 184 requests   [#################.....]""",
)
