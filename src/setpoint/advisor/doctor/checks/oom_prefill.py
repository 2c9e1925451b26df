"""oom-prefill: memory runs out while prompts are computed."""

from __future__ import annotations

from setpoint.advisor.doctor.case import Case
from setpoint.advisor.doctor.checks.check import Check
from setpoint.advisor.doctor.checks.common import estimate, once, said
from setpoint.advisor.doctor.checks.memory import lower_fraction, ooms, tried_gb
from setpoint.advisor.doctor.findings import Action, Effect, Finding, RuledOut
from setpoint.advisor.doctor.observations import Event, Evidence

LEAST_CHUNK = 2048
DEFAULT_CHUNK = 8192
WITHOUT_CHUNKS = 4096


def find(case: Case) -> Finding | None:
    found = ooms(case, "prefill")
    if not found:
        return None
    event = found[0]
    chunk = _chunk(case, event)
    action = _action(case, event, chunk)
    size = tried_gb(event)
    tried = "" if size is None else f" of {size:.2f} GB"
    return Finding(
        cause="oom-prefill",
        confidence=0.95,
        summary=f"An allocation{tried} failed while a prompt was computed"
        + (f" in chunks of {chunk} tokens." if chunk > 0 else ", which is not split into chunks."),
        evidence=once(
            (
                Evidence(event.line, event.text),
                *said(case, "chunked_prefill_size"),
                *said(case, "available_gb"),
            )
        ),
        action=action,
        effect=_effect(action, chunk),
        ruled_out=(
            RuledOut("oom-init", "The server was ready or had run batches before."),
            RuledOut("oom-decode", "The traceback or the last batch line is about a prefill."),
        ),
        risk="Smaller chunks make the prefill of long prompts slower."
        if action.flag == "--chunked-prefill-size"
        else "A smaller pool runs fewer requests at once.",
        verify="Send the longest prompts that occur, several at once: the server goes on.",
        falsify="The same error with smaller chunks: then logprobs of the prompt, images, or "
        "another process take the memory.",
        share=1.0,
    )


def _chunk(case: Case, event: Event) -> int:
    """Tokens of a prefill at most; -1 if prompts are not split."""
    if case.facts.chunked_prefill_size is not None:
        return case.facts.chunked_prefill_size
    moments = [moment for rank in case.ranks for moment in rank.moments]
    largest = max((moment.largest_prefill for moment in moments), default=0)
    return largest if largest > LEAST_CHUNK else DEFAULT_CHUNK


def _action(case: Case, event: Event, chunk: int) -> Action:
    doing = event.values.get("doing")
    note = {
        "logprobs": " The failed step computes logprobs of prompts: ask for fewer of them.",
        "vision": " The failed step encodes images: limit their number or size.",
    }.get(str(doing), "")
    if chunk <= 0:
        return Action(
            f"Start the server with --chunked-prefill-size {WITHOUT_CHUNKS}: today a prompt is "
            f"computed in one piece, however long it is.{note}",
            "--chunked-prefill-size",
            "set",
            WITHOUT_CHUNKS,
        )
    if chunk > LEAST_CHUNK:
        value = max(LEAST_CHUNK, chunk // 2)
        return Action(
            f"Start the server with --chunked-prefill-size {value}: the memory for activations "
            "is in proportion to the tokens of a chunk. If that is not enough, lower "
            f"--mem-fraction-static, too.{note}",
            "--chunked-prefill-size",
            "decrease",
            value,
        )
    return lower_fraction(
        case,
        (tried_gb(event) or 1.0) + 2.0,
        f"Start the server with {{}}: chunks of {chunk} tokens are small already, so that the pool "
        f"must leave more memory.{note}",
    )


def _effect(action: Action, chunk: int) -> Effect | None:
    if action.flag != "--chunked-prefill-size" or chunk <= 0 or not action.value:
        return None
    part = action.value / chunk
    return estimate(
        "peak memory of activations",
        part,
        part,
        1.0,
        f"in proportion to the chunk: {action.value} / {chunk} tokens",
    )


CHECK = Check(
    cause="oom-prefill",
    title="Memory runs out while prompts are computed",
    find=find,
    meaning="Outside the KV pool a step needs memory for its activations, in proportion to the "
    "tokens that it computes. A prefill computes thousands at once, so that it needs most. The "
    "server had started well and fails at the first batch of prompts that is large enough.",
    rule="An allocation failed after the server was ready or had run batches, and the frames of "
    "the traceback are about a prefill; without a traceback, the last batch line before it is.",
    counter_evidence="No batch had run and no ready line was written: oom-init. A decode step in "
    "the traceback: oom-decode.",
    guide="All guides: if memory runs out in prefill, lower --chunked-prefill-size to 4096 or "
    "2048; lowering --mem-fraction-static helps prefill and decode. Logprobs of prompts and images "
    "need memory that neither option bounds (sglang#2607).",
    equation="value = max(2048, chunk / 2); from 2048 on: mem-fraction-static - (failed allocation "
    "+ 2 GB) / device",
    picture="""\
free when ready   [......6 GB......]
prefill of 8192   [############]####   needs more than is free
prefill of 4096   [######..........]""",
)
