"""not-enough-evidence: the source does not show what an answer would need."""

from __future__ import annotations

from setpoint.doctor.case import MIN_COVERAGE, MIN_LINES, Case
from setpoint.doctor.checks.check import Check
from setpoint.doctor.checks.common import quote
from setpoint.doctor.findings import Action, Finding
from setpoint.doctor.observations import SourceKind

READ_MORE: dict[SourceKind, str] = {
    "log": "Read a log of at least one minute under the load that matters.",
    "metrics": "Read metrics of at least one minute under the load that matters.",
    "server": "Watch the server for at least a minute under the load that matters (--seconds 60).",
    "recording": "Record at least one minute under the load that matters.",
    "live": "Look again when the server has been under the load that matters for a minute.",
}
"""What to do for a verdict, by the kind of the source."""
_UNITS: dict[SourceKind, str] = {"log": "lines", "metrics": "scrapes"}


def find(case: Case) -> Finding | None:
    if case.has_load:
        return None
    return Finding(
        cause="not-enough-evidence",
        confidence=0.9,
        summary=_summary(case),
        evidence=quote(case.load, 2),
        action=Action(READ_MORE[case.kind]),
    )


def _summary(case: Case) -> str:
    if not any(rank.moments for rank in case.ranks):
        return "There is not enough evidence: no batch of a server was found, so there is no load."
    if case.seen.coverage < MIN_COVERAGE:
        return (
            f"There is not enough evidence: only {100 * case.seen.coverage:.0f} % of the batch "
            "lines could be read."
        )
    if not len(case.load):
        return "There is not enough evidence: only starts, ends and single requests, but no load."
    return f"There is not enough evidence: only {case.span} about steady load. " + (
        f"A verdict needs at least {MIN_LINES} {_UNITS.get(case.kind, 'moments')} that agree."
        if len(case.load) < MIN_LINES
        else "They are of the first seconds of a load, which has not become steady yet."
    )


CHECK = Check(
    cause="not-enough-evidence",
    title="There is not enough evidence",
    find=find,
    meaning="The doctor gives no advice that it cannot support. One or two lines, a start without "
    "load, the end of a benchmark, or a log of which hardly a line could be read do not show what "
    "limits a server.",
    rule="No other cause is found, and there are fewer than 3 lines about steady load, or less "
    "than half of the batch lines could be read, or requests wait and nothing shows why. An "
    "excerpt of 3 to 9 lines gets a verdict only if three quarters of its lines agree, and the "
    "verdict is less sure.",
    counter_evidence="A failed start, an out-of-memory error or an ended server is reported "
    "without any load: the messages are evidence enough.",
    advice="Read more: a minute under the load that matters, with the lines of the start.",
    guide="The guides begin with 'when the server is running at full load, look for the following "
    "in the log': figures from any other time say nothing about a limit.",
)
