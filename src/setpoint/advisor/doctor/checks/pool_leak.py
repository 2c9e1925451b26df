"""pool-leak: pages of the KV pool are lost."""

from __future__ import annotations

from setpoint.advisor.doctor.case import Case
from setpoint.advisor.doctor.checks.check import Check
from setpoint.advisor.doctor.checks.common import events
from setpoint.advisor.doctor.findings import Action, Finding, RuledOut
from setpoint.advisor.doctor.observations import Evidence
from setpoint.observe.moments import Moment

SURE = 1.05
"""Tokens for each running request, as a multiple of the longest context."""
MIN_MOMENTS = 5


def find(case: Case) -> Finding | None:
    leaks = events(case, "leak")
    if leaks:
        evidence = tuple(Evidence(event.line, event.text) for event in leaks[:3])
        return _finding(
            case,
            0.97,
            "The server's own check found pages of the KV pool that nobody has: "
            f"{sum(rank.num_events.get('leak', 0) for rank in case.ranks)} messages.",
            evidence,
        )
    lost = _impossible(case)
    if len(lost) < MIN_MOMENTS:
        return None
    last = lost[-1]
    return _finding(
        case,
        0.8,
        f"{last.running:.0f} running requests hold {last.tokens:.0f} tokens, more than contexts of "
        f"{case.facts.context_len} tokens can: pages of the KV pool are lost.",
        tuple(Evidence(moment.line, moment.text) for moment in (lost[0], last)),
    )


def _impossible(case: Case) -> list[Moment]:
    """Moments at which the running requests hold more tokens than their contexts allow."""
    context = case.facts.context_len
    if not context:
        return []
    return [
        moment
        for rank in case.ranks
        for moment in rank.moments
        if moment.num_decode
        and not moment.num_prefill
        and moment.running_max is not None
        and moment.tokens is not None
        and moment.tokens > SURE * context * max(moment.running_max, 1.0)
    ]


def _finding(case: Case, sure: float, summary: str, evidence: tuple[Evidence, ...]) -> Finding:
    radix = case.option("disable_radix_cache") is not True
    return Finding(
        cause="pool-leak",
        confidence=sure,
        summary=summary,
        evidence=evidence,
        action=Action(
            "Restart the server, and move to a version in which the leak is mended; it is an error "
            "of the server, which no option mends."
            + (
                " Until then, --disable-radix-cache avoids many of these errors, at the cost of "
                "computing shared prefixes again."
                if radix
                else ""
            )
        ),
        ruled_out=(
            RuledOut(
                "kv-full", "The pages are not in use by requests: more memory would be lost, too."
            ),
        ),
        verify="With no request running, token usage goes back to 0.00.",
        falsify="Usage falls to 0 when the server is idle, and no message comes back.",
        share=1.0,
    )


CHECK = Check(
    cause="pool-leak",
    title="Pages of the KV pool are lost",
    find=find,
    meaning="Every page of the pool is free, in use by a request, or kept as a prefix that can be "
    "evicted. If the three do not add up to the whole, pages are lost: usage creeps up until "
    "nothing can be admitted, or the server's own check ends it.",
    rule="A message that the memory pool leaks or that its accounting is broken; or, in at least "
    f"{MIN_MOMENTS} decode lines, more tokens in use than the running requests' contexts can hold.",
    counter_evidence="High usage with many running requests is no leak. Prefixes that can be "
    "evicted do not count as used.",
    guide="The guides do not treat it. Reports: sglang#140, #6778 (usage creeps to 0.96 and "
    "nothing runs any more), #6888, #11970, #20010.",
    equation="lost = total - (available + evictable + protected)",
    picture="""\
usage    0.2 .. 0.4 .. 0.6 .. 0.8 .. 0.96
running  30     28     31     12     0      (usage should follow)""",
)
