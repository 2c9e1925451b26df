"""From observations to a report: all checks, ranked, without contradictions."""

from __future__ import annotations

from dataclasses import replace

from setpoint.doctor.case import AGREE, Case, examine
from setpoint.doctor.checks import BY_CAUSE, CHECKS, cpu_contended
from setpoint.doctor.checks.cache_tier import praise
from setpoint.doctor.checks.common import events, on_lines
from setpoint.doctor.checks.not_enough_evidence import READ_MORE
from setpoint.doctor.findings import Action, Finding, Report, RuledOut
from setpoint.doctor.observations import Evidence, Observations, Source

FATAL = ("server-dead", "pool-leak", "oom-init", "oom-decode", "oom-prefill")
"""The server ended or its memory is wrong: nothing else matters before that is mended."""
ADVICE = ("mem-headroom-low", "backend-suboptimal", "parallelism-suboptimal", "cache-tier")
"""Nothing binds because of them."""
STATES = ("healthy", "not-enough-evidence")
BINDING = (
    "client-bound",
    "seq-cap",
    "kv-conservative",
    "kv-optimistic",
    "kv-full",
    "prefill-budget",
    "long-prompt-blocking",
    "queue-too-long",
    "graph-miss",
    "mem-underused",
    "prefix-miss",
    "batch-too-large",
    "rank-imbalance",
    "grammar-queue",
    "other-pool-full",
    "host-bound",
    "cpu-contended",
    "admission-delayed",
)
RESIDUAL = "kv-conservative"
"""A queue beside free memory without another reason for it."""
EXPLAINS: dict[str, tuple[str, ...]] = {
    "mem-underused": ("kv-full",),
    "long-prompt-blocking": ("prefill-budget", "client-bound"),
    "prefill-budget": ("client-bound",),
    "kv-full": ("prefill-budget",),
    "queue-too-long": ("kv-full",),
    "graph-miss": ("client-bound", "kv-full"),
    "mem-headroom-low": ("client-bound", "kv-full"),
    "batch-too-large": ("client-bound",),
    "prefix-miss": (
        "client-bound",
        "kv-full",
        "kv-conservative",
        "prefill-budget",
        "mem-underused",
    ),
    "rank-imbalance": (
        "client-bound",
        "seq-cap",
        "kv-full",
        "kv-conservative",
        "prefill-budget",
        "mem-underused",
        "queue-too-long",
    ),
    "grammar-queue": ("client-bound",),
    "other-pool-full": ("client-bound", "seq-cap"),
    "host-bound": ("client-bound",),
    "cpu-contended": ("client-bound", "host-bound", "prefill-budget", "queue-too-long"),
    "admission-delayed": ("client-bound", "prefill-budget", "kv-conservative"),
}
"""A cause that stands before others which it brings about, or which say less."""

UNEXPLAINED = "There is not enough evidence: requests wait, and nothing that was read shows why."
SEVERE = 0.76
"""Confidence from which mem-headroom-low stands before the causes that it may stand before: two
fifths or more of the headroom are missing, and the next long prompt may end the server."""

HEADROOM_FLAGS = (
    "--chunked-prefill-size",
    "--max-prefill-tokens",
    "--mem-fraction-static",
    "--cuda-graph-max-bs",
)
"""Options that take memory from what is free when the server is ready."""


def diagnose(seen: Observations) -> Report:
    """The report about one life of one server. Never raises for what a source may hold."""
    case = examine(seen)
    found = [finding for check in CHECKS if (finding := check.find(case)) is not None]
    states = {finding.cause: finding for finding in found if finding.cause in STATES}
    limits = [finding for finding in found if finding.cause not in STATES]
    if any(finding.cause in FATAL for finding in limits):
        # What bound before the failure is no advice: the server must be mended first.
        limits = [finding for finding in limits if finding.cause in FATAL + ADVICE]
    elif case.is_excerpt:
        limits = [finding for finding in limits if _agrees(finding)]
    findings = without_overdraft(without_residual(rank_findings(limits)))
    findings = without_contradictions(without_ruled_out(findings))
    findings = [replace(each, evidence=_located(seen, each.evidence)) for each in findings]
    state = states.get("healthy") or states.get("not-enough-evidence")
    if findings:
        verdict, summary = findings[0].cause, findings[0].summary
    elif state is not None:
        verdict, summary = state.cause, state.summary
    else:
        verdict, summary = "not-enough-evidence", UNEXPLAINED
    return Report(
        verdict=verdict,
        summary=summary,
        findings=findings,
        coverage=seen.coverage,
        sources=_with_notes(case, [*found, *findings]),
        phases=case.phases,
        missing=missing(case, verdict),
        evidence=() if findings or state is None else _located(seen, state.evidence),
    )


def _agrees(finding: Finding) -> bool:
    """Whether nearly all lines of an excerpt show this limit. The share of cpu-contended is that of
    the CPU, and each line about it covers many seconds."""
    return finding.share is None or finding.share >= AGREE or finding.cause == "cpu-contended"


def _with_notes(case: Case, findings: list[Finding]) -> list[Source]:
    """The sources; the first has notes about cache tiers that pay, and about what the server itself
    has said of its limits and these findings do not."""
    seen = case.seen
    causes = {finding.cause for finding in findings}
    notes = [words for tiers in seen.tiers if (words := praise(tiers))]
    if "cpu-contended" not in causes and (words := cpu_contended.note(case)):
        notes.append(words)
    said = events(case, "diagnosed")
    limit = str(said[-1].values["limit"]) if said else ""
    if limit in BY_CAUSE and limit not in causes and "busy_s" not in said[-1].values:
        notes.append(
            f"The server's own doctor named {limit} ({on_lines(case, said[-1:])}), which this log"
            " does not show. Ask the server while it is under load: setpoint doctor URL."
        )
    if not notes or not seen.sources:
        return seen.sources
    first, *others = seen.sources
    return [replace(first, notes=[*notes, *first.notes]), *others]


def _located(seen: Observations, evidence: tuple[Evidence, ...]) -> tuple[Evidence, ...]:
    """The evidence with the file of each line, if there are several."""
    return tuple(
        replace(each, source=each.source or seen.files.get((each.line, each.text), ""))
        for each in evidence
    )


def rank_findings(findings: list[Finding]) -> list[Finding]:
    """The binding limit first: what ended the server, then the limit that binds most of the loaded
    time, then advice."""

    def tier(finding: Finding) -> int:
        for place, causes in enumerate((FATAL, BINDING, ADVICE)):
            if finding.cause in causes:
                return place
        raise KeyError(finding.cause)

    def weight(finding: Finding) -> float:
        return finding.confidence * (1.0 if finding.share is None else finding.share)

    order = sorted(findings, key=lambda finding: (tier(finding), -weight(finding)))
    for cause, later in EXPLAINS.items():
        places = {finding.cause: index for index, finding in enumerate(order)}
        earlier = [places[other] for other in later if other in places]
        if cause in ADVICE and cause in places and order[places[cause]].confidence < SEVERE:
            continue
        if cause in places and earlier and min(earlier) < places[cause]:
            order.insert(min(earlier), order.pop(places[cause]))
    return order


def without_residual(findings: list[Finding]) -> list[Finding]:
    """Drop the finding whose only reason is that nothing else explains the queue, if something else
    does. It stays as an alternative of the first finding."""
    first = next((finding for finding in findings if finding.cause in BINDING), None)
    residual = next((finding for finding in findings if finding.cause == RESIDUAL), None)
    if first is None or residual is None or first is residual:
        return findings
    why = (
        "It is what remains if nothing else keeps requests waiting. Look for it again once this is "
        f"mended. {residual.summary}"
    )
    others = tuple(each for each in first.ruled_out if each.cause != RESIDUAL)
    named = replace(first, ruled_out=(*others, RuledOut(RESIDUAL, why)))
    kept = [finding for finding in findings if finding is not residual]
    return [named if finding is first else finding for finding in kept]


def without_overdraft(findings: list[Finding]) -> list[Finding]:
    """Drop findings whose remedy needs the memory that is missing. If next to none is free, that
    finding comes first, and names them among its alternatives."""
    low = next((finding for finding in findings if finding.cause == "mem-headroom-low"), None)
    if low is None or low.confidence < SEVERE:
        return findings
    asking = [
        finding
        for finding in findings
        if finding.cause in BINDING and _needs_headroom(finding.action)
    ]
    if not asking:
        return findings
    why = "Its remedy needs memory that is not free. Look for it again once enough is. "
    named = tuple(RuledOut(each.cause, why + each.summary) for each in asking)
    causes = {each.cause for each in asking}
    others = tuple(each for each in low.ruled_out if each.cause not in causes)
    first = replace(low, ruled_out=(*others, *named))
    place = min(findings.index(each) for each in (low, *asking))
    rest = [each for each in findings if each is not low and each not in asking]
    return [*rest[:place], first, *rest[place:]]


def _needs_headroom(action: Action) -> bool:
    """Whether it takes memory from what is free, or first makes room there."""
    if action.direction == "increase":
        return action.flag in HEADROOM_FLAGS
    return action.direction == "decrease" and action.flag == "--mem-fraction-static"


def without_ruled_out(findings: list[Finding]) -> list[Finding]:
    """Drop findings that one before them rules out, and says why."""
    kept: list[Finding] = []
    for finding in findings:
        if not any(finding.cause == each.cause for other in kept for each in other.ruled_out):
            kept.append(finding)
    return kept


def without_contradictions(findings: list[Finding]) -> list[Finding]:
    """Keep the first of several findings that ask for opposite changes of one flag; it names the
    others among its alternatives."""
    kept: list[Finding] = []
    for finding in findings:
        against = next(
            (index for index, other in enumerate(kept) if opposed(other.action, finding.action)),
            None,
        )
        if against is None:
            kept.append(finding)
            continue
        why = (
            f"It would ask for the opposite change of {finding.action.flag}, and is only "
            f"{100 * finding.confidence:.0f} % sure. {finding.summary}"
        )
        stays = kept[against]
        alternatives = tuple(each for each in stays.ruled_out if each.cause != finding.cause)
        kept[against] = replace(stays, ruled_out=(*alternatives, RuledOut(finding.cause, why)))
    return kept


def opposed(one: Action, other: Action) -> bool:
    """Whether two actions cannot both be taken."""
    if one.flag is None or one.flag != other.flag:
        return False
    if {one.direction, other.direction} == {"increase", "decrease"}:
        return True
    return one.direction == other.direction == "set" and one.value != other.value


def missing(case: Case, verdict: str) -> tuple[str, ...]:
    """What would make an answer possible, or surer."""
    if verdict in FATAL:
        return ()
    if verdict != "not-enough-evidence":
        more = f"This is judged from {case.span}, so it is less sure. {READ_MORE[case.kind]}"
        return (more,) if case.is_excerpt else ()
    wanted = []
    if not case.has_load:
        wanted.append(READ_MORE[case.kind])
    if case.facts.max_running_requests is None or case.facts.max_total_num_tokens is None:
        is_log = case.kind == "log"
        wanted.append(
            ("Keep the start of the log: the" if is_log else "Read the server's log as well: its")
            + " ready line (max_total_num_tokens=…) shows the limits, the size of the KV pool and"
            " the free memory."
        )
    if case.seen.coverage < 0.8:
        wanted.append("Read the log as the server wrote it: many batch lines were not understood.")
    return tuple(wanted)
