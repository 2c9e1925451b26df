"""long-prompt-blocking: one long prompt at a time holds up the others."""

from __future__ import annotations

from setpoint.advisor.doctor.case import Case
from setpoint.advisor.doctor.checks.check import Check
from setpoint.advisor.doctor.checks.common import confidence, estimate, percent, quote, said
from setpoint.advisor.doctor.checks.long_prompts import chunks_of_one
from setpoint.advisor.doctor.checks.prefill_budget import prefill_action
from setpoint.advisor.doctor.findings import Action, Finding, RuledOut
from setpoint.advisor.doctor.limits import FULL, at_budget

MIN_SHARE = 0.1
"""Share of the loaded time that rows of chunks take."""


def find(case: Case) -> Finding | None:
    if not case.has_load:
        return None
    blocking, longest = chunks_of_one(case)
    share = sum(blocking.weights) / (sum(case.load.weights) or 1.0)
    counted = len(blocking) / max(len(case.load), 1)
    full = case.load.where(lambda moment: at_budget(moment, case.limits))
    usage = case.decoding.median(lambda moment: moment.usage)
    if max(share, counted) < MIN_SHARE or len(blocking) <= 0.5 * len(full):
        return None
    if usage is not None and usage >= FULL:
        return None
    queue = blocking.median(lambda moment: moment.queue) or 1.0
    size = case.limits.prefill_tokens or 1.0
    return Finding(
        cause="long-prompt-blocking",
        confidence=confidence(case, min(1.0, 0.4 + max(share, counted)), blocking, 0.92),
        summary=f"One long prompt at a time holds up the others: rows of full chunks of one prompt "
        f"(the longest of {longest:.0f} tokens, {longest / size:.0f} chunks) take "
        f"{percent(share)} of the loaded time while about {queue:.0f} requests wait.",
        evidence=quote(blocking, 4) + said(case, "chunked_prefill_size"),
        action=_action(case),
        effect=estimate(
            "time to first token of the requests behind",
            0.6,
            0.9,
            1.0,
            "fewer chunks have less fixed cost, and the last chunk of a prompt leaves more room "
            "for others; the tokens to compute stay the same (sglang#29358 measured little)",
        ),
        ruled_out=_alternatives(case, len(blocking), len(full), usage),
        risk="Activations of larger chunks take memory (about 1.5 MB a token), and running "
        "requests wait longer for their next token. Long prompts on a server of their own have "
        "neither cost.",
        verify="The 95th percentile of the time to first token falls while the median stays.",
        falsify="Short requests wait as long when no long prompt is being computed.",
        share=round(max(share, counted), 3),
    )


def _action(case: Case) -> Action:
    action = prefill_action(case)
    return Action(
        f"{action.text} If that is not enough, send long prompts to a server of their own: only "
        "one prompt may be partly computed at a time, which no option changes.",
        action.flag,
        action.direction,
        action.value,
        live=action.live,
    )


def _alternatives(
    case: Case, blocking: int, full: int, usage: float | None
) -> tuple[RuledOut, ...]:
    why = [
        RuledOut(
            "prefill-budget",
            f"{blocking} of {full} full batches hold one prompt alone; many prompts together would "
            "share them.",
        )
    ]
    if usage is not None:
        why.append(RuledOut("kv-full", f"The median usage is {usage:.2f}: memory is free."))
    running = case.decoding.median(lambda moment: moment.running)
    if case.limits.slots and running is not None:
        why.append(
            RuledOut("seq-cap", f"About {running:.0f} of {case.limits.slots:.0f} slots are used.")
        )
    return tuple(why)


CHECK = Check(
    cause="long-prompt-blocking",
    title="One long prompt at a time holds up the others",
    find=find,
    meaning="A prompt that is longer than a prefill batch is computed in chunks, and only one "
    "prompt may be partly computed at a time. Its chunks come first in each step and fill it. "
    "Until its last chunk, no other request is admitted, however short it is; the running ones "
    "get no step of their own either, unless chunks are mixed with decode.",
    rule="Rows of three or more full chunks of one prompt (one sequence, the whole budget) while "
    "requests wait take a tenth of the loaded time or of its lines, are more than half of all "
    "full prefill batches, and usage is below 0.9.",
    counter_evidence="Full batches of many prompts are prefill-budget. If all prompts are equally "
    "long, nobody short is held up, and the remedy is the same or more devices.",
    guide="SGLang's tuning guide, 2026: if long prompts dominate, raise --chunked-prefill-size. "
    "Its own list of remedies for memory asks for the opposite, and chunks of 32768 tokens made "
    "prefill about 10 % faster and the time to first token hardly shorter (sglang#29358). That one "
    "prompt at a time may be partly computed is called a missing mechanism in sglang#34623.",
    equation="value as for prefill-budget; steps that a prompt needs = tokens / chunk",
    picture="""\
step     1        2        3        4        5        6
chunk  [AAAAAAA][AAAAAAA][AAAAAAA][AAAAAAA][AAAAbcd][ decode ]
queue   b c d    b c d e  b c d e  b c d e f ...
        four short requests wait for one prompt of 33000 tokens""",
)
