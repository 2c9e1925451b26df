"""not-enough-evidence: the source does not show what an answer would need."""

from __future__ import annotations

from setpoint.advisor.doctor.case import MIN_COVERAGE, MIN_LINES, MIN_SECONDS, Case
from setpoint.advisor.doctor.checks.check import Check
from setpoint.advisor.doctor.checks.common import counted, quote
from setpoint.advisor.doctor.findings import Action, Finding


def find(case: Case) -> Finding | None:
    if case.has_load:
        return None
    return Finding(
        cause="not-enough-evidence",
        confidence=0.9,
        summary=_summary(case),
        evidence=quote(case.load, 2),
        action=Action("Give a log of at least a minute under the load that matters."),
    )


def _summary(case: Case) -> str:
    if not any(rank.moments for rank in case.ranks):
        return "The source shows no batch of a server, so there is no load to judge."
    if case.seen.coverage < MIN_COVERAGE:
        return f"Only {100 * case.seen.coverage:.0f} % of the batch lines could be read."
    if not len(case.load):
        return "The source shows no load: only starts, ends and single requests."
    seconds = f" in {case.load.seconds:.0f} seconds" if case.load.has_clock else ""
    return (
        f"The source shows {counted(len(case.load), 'moment')} under steady load{seconds}; "
        f"a judgement takes at least {MIN_LINES} in {MIN_SECONDS:.0f} seconds."
    )


CHECK = Check(
    cause="not-enough-evidence",
    title="Too little to judge",
    find=find,
    meaning="Advice is worth what its error rate is. A few lines, a start without load, the end of "
    "a benchmark, or a log that could hardly be read allow no judgement, so that none is given.",
    rule="No other cause is found, and the source shows fewer than 5 moments or less than 20 "
    "seconds of steady load (10 lines are enough however fast they came), or less than half of "
    "its batch lines could be read, or requests wait and nothing in it tells why.",
    counter_evidence="A failed start, a lack of memory or a dead server need no load: their "
    "messages are evidence enough.",
    guide="The guides begin with 'when the server is running at full load, look for the following "
    "in the log': figures from any other time say nothing about a limit.",
)
