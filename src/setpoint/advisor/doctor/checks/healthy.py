"""healthy: the state that the guides aim at."""

from __future__ import annotations

from setpoint.advisor.doctor.case import Case
from setpoint.advisor.doctor.checks.check import Check
from setpoint.advisor.doctor.checks.common import confidence, per_minute, percent, quote
from setpoint.advisor.doctor.checks.kv_optimistic import retracts_often
from setpoint.advisor.doctor.checks.queue_too_long import MOST
from setpoint.advisor.doctor.findings import Action, Finding
from setpoint.advisor.doctor.limits import at_cap
from setpoint.advisor.doctor.load import Load

GOOD = 0.85
"""Usage from which nothing worth a change is held back."""
FEW = 0.2
"""Waiting requests for each running one that are no more than arrivals in steps."""


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
    if usage is not None and usage >= GOOD:
        waiting = f"a queue of {queue:.0f}" if queue else "no queue"
        return _finding(
            case,
            load,
            0.95,
            f"The KV pool is in good use ({percent(usage)}) with {waiting} and {per_minute(case)}: "
            "nothing needs a change.",
        )
    if queue <= max(FEW * running, 1.0):
        capped = load.share(lambda moment: at_cap(moment, case.limits)) > 0.5
        why = "all slots are in use and hardly anything waits" if capped else "nothing waits long"
        return _finding(
            case,
            load,
            0.7,
            f"The server keeps up with its load: {running:.0f} requests run, a median of "
            f"{queue:.0f} wait, and {why}.",
        )
    return None


def _finding(case: Case, load: Load, best: float, summary: str) -> Finding:
    return Finding(
        cause="healthy",
        confidence=confidence(case, 0.9, load, best),
        summary=summary,
        evidence=quote(load),
        action=Action("Change nothing."),
        falsify="Clients see long waits although this source shows none: then look in front of "
        "the server.",
    )


CHECK = Check(
    cause="healthy",
    title="The server is in the state that the guides aim at",
    find=find,
    meaning="The memory for keys and values is well used, some requests wait so that no slot stays "
    "empty, and running requests are rarely thrown back. Or: the server does all that it is asked "
    "for, hardly anything waits, and no limit is near.",
    rule="Nothing else is found; under load the median usage is 0.85 or more, at most 2000 wait, "
    "and there is at most about one retraction a minute; or at most a fifth as many wait as run.",
    counter_evidence="An empty queue with an empty pool is client-bound: the server is fine, but "
    "could do more. A queue that grows without end at a full pool is kv-full.",
    guide="SGLang's tuning guides: usage above 0.9, a queue of 50 to 500 (2024) or 100 to 2000 "
    "(2025 and later), about one retraction a minute at most, 5 to 8 GB of memory free when the "
    "server is ready, and decode graphs in use.",
    picture="""\
usage      [###########.] 0.93      queue  [###    ] 150
running    [##########  ] 230       retractions: 1 in 5 minutes""",
)
