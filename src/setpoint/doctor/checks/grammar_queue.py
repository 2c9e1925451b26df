"""grammar-queue: requests wait for their grammars to be compiled."""

from __future__ import annotations

from setpoint.doctor.binding_limit import FULL
from setpoint.doctor.case import Case
from setpoint.doctor.checks.check import Check
from setpoint.doctor.checks.common import confidence, counted, during, quote, quote_events
from setpoint.doctor.findings import Action, Finding, RuledOut

MIN_SHARE = 0.5
MIN_TIMEOUTS = 3
_ACTION = Action(
    "Have the clients use few schemas and send each one in exactly the same form, so that its "
    "compiled grammar is found in the cache. Send one request with each schema first. Schemas with "
    "deep recursion or large repetitions take longest: simplify those."
)


def find(case: Case) -> Finding | None:
    return _timed_out(case) or _waiting(case)


def _timed_out(case: Case) -> Finding | None:
    """Requests whose grammar was never ready: their time was up before they joined the queue."""
    count = sum(rank.num_events.get("grammar-timeout", 0) for rank in case.ranks)
    usage = case.decoding.median(lambda moment: moment.usage)
    if count < MIN_TIMEOUTS or (usage is not None and usage >= FULL):
        return None
    return Finding(
        cause="grammar-queue",
        confidence=0.75 if case.is_excerpt else 0.9,
        summary="Requests wait for their grammars to be compiled: "
        f"{counted(count, 'request')} gave up before the grammar was ready.",
        evidence=quote_events(case, "grammar-timeout", 3),
        action=_ACTION,
        ruled_out=(
            RuledOut(
                "client-bound",
                "A request joins the queue only once its grammar is compiled: these never did.",
            ),
        ),
        verify="No more lines say that the time of a grammar was up.",
        falsify="All requests use the same schema, which the server has compiled. Then they do not "
        "wait for its compilation.",
    )


def _waiting(case: Case) -> Finding | None:
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
        summary=f"Requests wait for their grammars to be compiled: {during(share)}, about "
        f"{count:,.0f} wait for a grammar and {queue:,.0f} wait in the queue.",
        evidence=quote(waiting),
        action=_ACTION,
        ruled_out=(
            RuledOut(
                "client-bound",
                f"The queue is short because requests that wait for a grammar (about "
                f"{count:,.0f}) have not joined it yet.",
            ),
        ),
        verify="Fewer requests wait for a grammar, and more run (#running-req).",
        falsify="All requests use the same schema. Then they do not wait for its compilation.",
        share=round(share, 3),
    )


CHECK = Check(
    cause="grammar-queue",
    title="Requests wait for their grammars to be compiled",
    find=find,
    meaning="A request for structured output (a JSON schema, a regular expression, a tool call) "
    "joins the queue only once its grammar is compiled. New or large schemas take long; a schema "
    "that was used before is found in a cache. Meanwhile the queue is short and the server has "
    "room.",
    rule="For at least half of the time under load, one or more requests wait for a grammar, at "
    "least half as many as are in the queue, and less than 90 % of the KV pool is in use. Only "
    "metrics and Setpoint's own records contain their number. In a log, at least three lines say "
    "that the time of a grammar was up ('Grammar preprocessing timed out').",
    counter_evidence="If the KV pool is full, these requests would have to wait anyway.",
    advice="Have the clients use few schemas, each in exactly the same form, and simpler ones.",
    guide="The guides do not cover it. It is one of the causes of a half-empty KV pool that can be "
    "mistaken for a scheduler that is too cautious (kv-conservative).",
    picture="""\
clients -> [ compiling: 24 ] -> queue [ 0 ] -> running [##      ]""",
)
