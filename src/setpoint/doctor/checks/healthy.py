"""healthy: the state that the guides aim at."""

from __future__ import annotations

from setpoint.doctor.binding_limit import at_cap
from setpoint.doctor.case import Case
from setpoint.doctor.checks.check import Check
from setpoint.doctor.checks.common import (
    acting,
    confidence,
    per_minute,
    percent,
    quote,
)
from setpoint.doctor.checks.kv_conservative import is_used_up
from setpoint.doctor.checks.kv_optimistic import retracts_often
from setpoint.doctor.checks.queue_too_long import MOST
from setpoint.doctor.findings import Action, Finding
from setpoint.doctor.load import Load

GOOD = 0.85
"""Usage from which nothing worth a change is held back."""
GOOD_BEFORE_PEAKS = 0.7
"""The same, if the rest is in use at times."""
FEW = 0.2
"""Up to so many waiting requests for each running one are only arrivals between steps."""


def find(case: Case) -> Finding | None:
    if not case.has_load:
        return None
    if retracts_often(case):
        return None
    load = case.decoding
    usage = load.median(lambda moment: moment.usage)
    running = load.median(lambda moment: moment.running) or 0.0
    queue = load.median(lambda moment: moment.queue) or 0.0
    if queue > MOST:
        return None
    if usage is not None and (usage >= GOOD or (usage >= GOOD_BEFORE_PEAKS and is_used_up(case))):
        waiting = (
            f"{acting(queue, 'request', 'wait')} in the queue" if queue else "no request waits"
        )
        return _finding(
            case,
            load,
            0.95,
            f"The server is healthy: {percent(usage)} of the KV pool is in use, {waiting}, and "
            f"there are {per_minute(case)}. Nothing needs to change.",
        )
    if queue <= max(FEW * running, 1.0):
        capped = load.share(lambda moment: at_cap(moment, case.limits)) > 0.5
        why = "the limit on running requests is reached" if capped else "no limit is near"
        return _finding(
            case,
            load,
            0.7,
            f"The server is healthy: it keeps up with its load. "
            f"{acting(running, 'request', 'run')} and {acting(queue, 'request', 'wait')} "
            f"(medians), and {why}. Nothing needs to change.",
        )
    return None


def _finding(case: Case, load: Load, best: float, summary: str) -> Finding:
    return Finding(
        cause="healthy",
        confidence=confidence(case, 0.9, load, best),
        summary=summary,
        evidence=quote(load),
        action=Action("Nothing needs to change."),
        falsify="Clients see long waits although the server shows none. Then look for the cause in "
        "front of the server.",
    )


CHECK = Check(
    cause="healthy",
    title="The server is healthy",
    find=find,
    meaning="The server is in the state that the guides aim at: the KV pool is well used, some "
    "requests wait so that a place never stays empty, and running requests are rarely retracted. "
    "Or the server keeps up with its load: hardly any request waits, and no limit is near.",
    rule="No other cause is found. Under load, 85 % or more of the KV pool is in use (median), or "
    "70 % if usage reaches 90 % for a tenth of the time; at most 2,000 requests wait, and there is "
    "at most about one retraction a minute. Or at most a fifth as many requests wait as run.",
    counter_evidence="An empty queue beside an empty KV pool is client-bound: nothing is wrong, "
    "but the server could do more. A queue that keeps growing beside a full KV pool is kv-full.",
    advice="Nothing needs to change.",
    guide="SGLang's tuning guides: token usage above 0.9, a queue of 50 to 500 (2024) or 100 to "
    "2000 requests (2025 and later), at most about one retraction a minute, 5 to 8 GB of memory "
    "free when the server is ready, and CUDA graphs in use.",
    picture="""\
KV pool in use     [###########.] 93 %   waiting       [###    ] 150
running requests   [##########  ] 230    retractions   1 in 5 minutes""",
)
