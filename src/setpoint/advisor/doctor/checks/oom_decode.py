"""oom-decode: memory runs out while tokens are generated."""

from __future__ import annotations

from setpoint.advisor.doctor.case import Case
from setpoint.advisor.doctor.checks.check import Check
from setpoint.advisor.doctor.checks.common import once, said
from setpoint.advisor.doctor.checks.memory import lower_fraction, ooms, tried_gb
from setpoint.advisor.doctor.equations import rounded
from setpoint.advisor.doctor.findings import Action, Finding, RuledOut
from setpoint.advisor.doctor.observations import Event, Evidence

FEW = 8
"""With so few running requests a cap would not help: the pool must give memory back."""
LESS = 0.8
"""Share of the running requests that may run after the change."""


def find(case: Case) -> Finding | None:
    found = ooms(case, "decode", "unknown")
    if not found:
        return None
    event = found[0]
    ran = _running_before(case, event)
    size = tried_gb(event)
    tried = "" if size is None else f" of {size:.2f} GB"
    running = "" if ran is None else f" with {ran:.0f} requests running"
    located = event.values.get("where") == "decode"
    action = _action(case, event, ran)
    return Finding(
        cause="oom-decode",
        confidence=0.95 if located else 0.7,
        summary=f"An allocation{tried} failed while tokens were generated{running}.",
        evidence=once(
            (
                Evidence(event.line, event.text),
                *_last_line(case, event),
                *said(case, "available_gb"),
            )
        ),
        action=action,
        ruled_out=(
            RuledOut("oom-init", "The server was ready or had run batches before."),
            RuledOut("oom-prefill", "The traceback or the last batch line is about a decode step."),
        ),
        risk="Fewer requests run at once, and more wait."
        if action.flag == "--max-running-requests"
        else "A smaller pool runs fewer requests at once.",
        verify="Under the load that failed, #running-req stays at or below the new cap and no "
        "allocation fails.",
        falsify="The same error with fewer running requests: then something grows that does not "
        "depend on their number, such as another process on the device.",
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
            f"Start the server with --max-running-requests {value}: {ran:.0f} running requests "
            "were too many. If the cap costs too much throughput, lower --mem-fraction-static "
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
            "Start the server with a smaller --max-running-requests"
            + (f", for instance {lower}." if lower else "."),
            "--max-running-requests",
            "decrease",
            lower,
            live=True,
        )
    return lower_fraction(
        case,
        (tried_gb(event) or 1.0) + 2.0,
        f"Start the server with {{}}: only {ran:.0f} requests were running, so that the pool must "
        "leave more memory.",
    )


CHECK = Check(
    cause="oom-decode",
    title="Memory runs out while tokens are generated",
    find=find,
    meaning="A decode step needs memory outside the KV pool: activations, logits and the sampler's "
    "copies of them, all in proportion to the running requests (a vocabulary of 150,000 entries "
    "in 32 bits is 0.6 MB for each). With enough of them it exceeds what was left free.",
    rule="An allocation failed after the server was ready or had run batches, and the frames of "
    "the traceback are about a decode step; without a traceback, the last batch line before it is.",
    counter_evidence="'decode out of memory happened' and 'KV cache pool is full. Retract "
    "requests.' are no failed allocations: the scheduler takes requests back (kv-optimistic).",
    guide="All guides: if memory runs out in decoding, lower --max-running-requests; lowering "
    "--mem-fraction-static helps both phases.",
    equation="value = 0.8 x running requests before the error; with 8 or fewer: "
    "mem-fraction-static - (failed allocation + 2 GB) / device",
    picture="""\
decode of 233 requests   [######################]##  more than is free
decode of 184            [#################.....]""",
)
