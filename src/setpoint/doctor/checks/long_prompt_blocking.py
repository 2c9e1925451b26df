"""long-prompt-blocking: one long prompt at a time holds up the others."""

from __future__ import annotations

from setpoint.doctor.binding_limit import FULL, at_budget
from setpoint.doctor.case import Case
from setpoint.doctor.checks.check import Check
from setpoint.doctor.checks.common import (
    acting,
    confidence,
    during,
    estimate,
    lines_on,
    percent,
    quote,
)
from setpoint.doctor.checks.long_prompts import chunks_of_one, stalling_chunks
from setpoint.doctor.checks.prefill_budget import (
    CHUNK_WHY,
    Outlook,
    outlook,
    prefill_action,
    smaller_effect,
)
from setpoint.doctor.findings import Action, Effect, Finding, RuledOut
from setpoint.doctor.load import Load
from setpoint.doctor.step_times import chunk_gains

MIN_SHARE = 0.1
"""Least share of the loaded time that runs of chunks take."""
MIN_STALLED = 0.5
"""The same if no request waits, so that they only hold up running ones."""


LARGER = Outlook(
    risk="Larger chunks need more memory for activations (about 1.5 MB per token), and running "
    "requests wait longer for their next token. A separate server for long prompts avoids both.",
    verify="The 95th percentile of the time to first token falls, and its median does not rise.",
    falsify="Short requests wait just as long when no long prompt is being computed.",
)


def find(case: Case) -> Finding | None:
    if not case.has_load:
        return None
    usage = case.decoding.median(lambda moment: moment.usage)
    full = case.load.where(lambda moment: at_budget(moment, case.limits))
    if usage is not None and usage >= FULL:
        return None
    blocking, longest = chunks_of_one(case)
    is_queue = _share(case, blocking) >= MIN_SHARE
    if not is_queue:
        blocking, longest = stalling_chunks(case)
        if _share(case, blocking) < MIN_STALLED:
            return None
    if len(blocking) <= 0.5 * len(full):
        return None
    share = _share(case, blocking)
    if case.is_excerpt:  # decode lines among them tell of the time before
        prefills = case.load.where(lambda moment: moment.num_prefill > 0)
        share = max(share, len(blocking) / max(len(prefills), 1))
    time = sum(blocking.weights) / (sum(case.load.weights) or 1.0)
    size = case.limits.prefill_tokens or 1.0
    queue = blocking.median(lambda moment: moment.queue) or 1.0
    running = blocking.median(lambda moment: moment.running) or 1.0
    held_up = (
        f"about {acting(queue, 'request', 'wait')}"
        if is_queue
        else f"about {acting(running, 'running request', 'wait')} for the next token"
    )
    action = _action(case, stalls=not is_queue)
    what = "Long prompts " + (
        "block the requests behind them" if is_queue else "hold up the running requests"
    )
    return Finding(
        cause="long-prompt-blocking",
        confidence=confidence(case, min(1.0, 0.4 + share), blocking, 0.92 if is_queue else 0.8),
        summary=f"{what}: {during(time)}, prefill computes "
        f"chunks of a single long prompt (the longest has {longest:,.0f} tokens in "
        f"{longest / size:.0f} chunks) while {held_up}.",
        evidence=quote(blocking, 4) + lines_on(case, "chunked_prefill_size"),
        action=action,
        effect=_effect(case, action),
        ruled_out=_alternatives(case, len(blocking), len(full), usage),
        share=round(share, 3),
        **outlook(action, LARGER),
    )


def _share(case: Case, blocking: Load) -> float:
    """Their share of the loaded time, or of its lines if that is larger."""
    time = sum(blocking.weights) / (sum(case.load.weights) or 1.0)
    return max(time, len(blocking) / max(len(case.load), 1))


def _effect(case: Case, action: Action) -> Effect | None:
    if action.direction != "increase":
        return smaller_effect(action)
    size, value = case.limits.prefill_tokens, action.value
    if case.facts.device == "cpu" and size and value:
        gains = chunk_gains(size, value)
        least, expected, most = sorted(1 / gain for gain in gains)
        return estimate(
            "time to first token of the requests that wait", least, expected, most, CHUNK_WHY
        )
    return estimate(
        "time to first token of the requests that wait",
        0.6,
        0.9,
        1.0,
        "fewer chunks have less fixed cost, and the last chunk of a prompt leaves more room for "
        "others, but the tokens to compute stay the same (sglang#29358 measured a small gain)",
    )


def _action(case: Case, *, stalls: bool) -> Action:
    action = prefill_action(case, stalls=stalls)
    return Action(
        f"{action.text} If that is not enough, send long prompts to a separate server: the "
        "scheduler works on only one partly computed prompt at a time, and no option changes that.",
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
            f"{blocking:,} of {full:,} full prefill batches hold a single prompt; if the budget "
            "were the limit, several prompts would share them.",
        )
    ]
    if usage is not None:
        why.append(RuledOut("kv-full", f"Only {percent(usage)} of the KV pool is in use (median)."))
    running = case.decoding.median(lambda moment: moment.running)
    if case.limits.slots and running is not None:
        why.append(
            RuledOut(
                "seq-cap",
                f"About {acting(running, 'request', 'run')}; "
                f"the limit is {case.limits.slots:,.0f}.",
            )
        )
    return tuple(why)


CHECK = Check(
    cause="long-prompt-blocking",
    title="Long prompts block the requests behind them",
    find=find,
    meaning="A prompt that is longer than a prefill batch is computed in chunks, and only one "
    "prompt at a time may be partly computed. Its chunks come first in every step and fill it. "
    "Until its last chunk is computed, no other request is admitted, however short it is. The "
    "running requests wait as well, unless prefill chunks are mixed with decode.",
    rule="Three or more prefill batches in a row each hold a full chunk of one and the same "
    "prompt (one sequence, the whole token budget). The prompt has at least 2.5 times the tokens "
    "of a usual one, requests wait meanwhile, and less than 90 % of the KV pool is in use. Such "
    "batches take at least a tenth of the time under load, or of its lines, and are more than half "
    "of all full prefill batches. If no request waits, but at least two run and stand still "
    "meanwhile, the batches must take at least half of the time.",
    counter_evidence="Full batches that several prompts share are prefill-budget. If all prompts "
    "are about equally long, no short request is blocked: that is prefill-budget as well.",
    advice="Raise --chunked-prefill-size, with the value, or send long prompts to a server of "
    "their own. For a Setpoint server on a CPU, where larger chunks compute no faster: lower it if "
    "it is running requests that wait; otherwise more cores or 8-bit weights.",
    guide="SGLang's tuning guide of 2026: if long prompts dominate, raise --chunked-prefill-size. "
    "Its remedies for running out of memory ask for the opposite, and chunks of 32768 tokens made "
    "prefill only about 10 % faster and the time to first token hardly shorter (sglang#29358). "
    "sglang#34623 calls it a missing feature that only one prompt may be partly computed.",
    equation="the new value is computed as for prefill-budget; a prompt needs tokens / chunk size "
    "steps",
    picture="""\
step     1        2        3        4        5        6
chunk  [AAAAAAA][AAAAAAA][AAAAAAA][AAAAAAA][AAAAbcd][ decode ]
queue   b c d    b c d e  b c d e  b c d e f ...
        the short requests b to f wait for one prompt of 33,000 tokens""",
)
