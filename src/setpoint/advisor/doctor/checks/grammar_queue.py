"""grammar-queue: requests wait for their grammars to be compiled."""

from __future__ import annotations

from setpoint.advisor.doctor.case import Case
from setpoint.advisor.doctor.checks.check import Check
from setpoint.advisor.doctor.checks.common import confidence, percent, quote
from setpoint.advisor.doctor.findings import Action, Finding, RuledOut
from setpoint.advisor.doctor.limits import FULL

MIN_SHARE = 0.5


def find(case: Case) -> Finding | None:
    waiting = case.load.where(lambda m: (m.preparing or 0.0) >= max(1.0, 0.5 * (m.queue or 0.0)))
    share = sum(waiting.weights) / (sum(case.load.weights) or 1.0)
    usage = case.decoding.median(lambda moment: moment.usage)
    if not case.has_load or share < MIN_SHARE or (usage is not None and usage >= FULL):
        return None
    count = waiting.median(lambda moment: moment.preparing) or 1.0
    queue = waiting.median(lambda moment: moment.queue) or 0.0
    return Finding(
        cause="grammar-queue",
        confidence=confidence(case, share, waiting, 0.9),
        summary=f"Requests wait for their grammars: about {count:.0f} are being prepared in "
        f"{percent(share)} of the loaded time, while {queue:.0f} wait for the scheduler.",
        evidence=quote(waiting),
        action=Action(
            "Let the clients use few schemas and send each in exactly the same form, so that its "
            "compiled grammar is found in the cache; send one request with each schema first."
        ),
        ruled_out=(
            RuledOut(
                "client-bound",
                f"The queue is short because {count:.0f} requests have not joined it yet.",
            ),
        ),
        verify="Fewer requests are being prepared, and more run.",
        falsify="All requests use one schema: then its compilation is not what they wait for.",
        share=round(share, 3),
    )


CHECK = Check(
    cause="grammar-queue",
    title="Requests wait for their grammars",
    find=find,
    meaning="A request for structured output (a JSON schema, an expression, a tool call) joins the "
    "queue when its grammar is compiled. New or large schemas take long; a schema that was seen "
    "before is found in a cache. Meanwhile the queue is short and the server has room.",
    rule="In at least half of the loaded time one or more requests are being prepared, at least "
    "half as many as are in the queue, and usage is below 0.9. Only metrics and Setpoint's own "
    "records tell their number.",
    counter_evidence="A full pool with requests in preparation: they would have to wait anyway.",
    guide="The guides do not have it. It is among the causes of a low usage that look like too "
    "much caution of the scheduler.",
    picture="""\
clients -> [ compiling: 24 ] -> queue [ 0 ] -> running [##      ]""",
)
