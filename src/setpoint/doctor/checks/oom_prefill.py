"""oom-prefill: memory runs out while prompts are computed."""

from __future__ import annotations

from setpoint.doctor.case import Case
from setpoint.doctor.checks.check import Check
from setpoint.doctor.checks.common import change, estimate, lines_on, once, whole
from setpoint.doctor.checks.memory import first_oom, larger_workspace, lower_fraction, tried_gb
from setpoint.doctor.findings import Action, Effect, Finding, RuledOut
from setpoint.doctor.observations import Event, Evidence

LEAST_CHUNK = 2048
MOST_CHUNK = 32768
USUAL_CHUNK = 4096
"""The value that the guides try first."""


def find(case: Case) -> Finding | None:
    found = first_oom(case, "prefill")
    if found is None:
        return None
    event, allocation = found
    chunk = _chunk(case, event)
    action = _action(case, event, chunk)
    return Finding(
        cause="oom-prefill",
        confidence=0.6 if event.values.get("by") == "order" else 0.95,
        summary=f"Memory runs out during prefill: {allocation} failed {_in_what(chunk)}",
        evidence=once(
            (
                Evidence(event.line, event.text),
                *lines_on(case, "chunked_prefill_size"),
                *lines_on(case, "available_gb"),
            )
        ),
        action=action,
        effect=_effect(action, chunk),
        ruled_out=(
            RuledOut("oom-init", "The server had been ready or had run batches before."),
            RuledOut("oom-decode", _shown(event)),
        ),
        risk="Smaller chunks make the prefill of long prompts slower."
        if action.flag == "--chunked-prefill-size"
        else "The KV pool gets smaller, so fewer requests run at once.",
        verify="Send several of the longest prompts that occur at once: the server keeps running.",
        falsify="The same error comes back with smaller chunks. Then prompt logprobs, images or "
        "another process on the device take the memory.",
        share=1.0,
    )


def _shown(event: Event) -> str:
    """The sentence that says why it was a prefill."""
    if event.values.get("by") != "order":
        return "The message or its traceback shows a prefill."
    if event.values.get("where") == "decode":
        return "The allocation is larger than what the running requests need in a decode step."
    return "The last batch line before the error is about a prefill, or no batch had run yet."


def _chunk(case: Case, event: Event) -> int | None:
    """The most tokens of a prefill; -1 if prompts are not split; None if it is not known."""
    chunk = case.facts.chunked_prefill_size
    if chunk is None:
        chunk = whole(case.number("chunked_prefill_size"))
    if chunk is not None:
        return chunk
    moments = [moment for rank in case.ranks for moment in rank.moments]
    largest = max((moment.largest_prefill for moment in moments), default=0)
    # Chunks have a round size. A batch larger than any usual chunk is a prompt in one piece.
    return largest if LEAST_CHUNK < largest <= MOST_CHUNK and largest % 1024 == 0 else None


def _in_what(chunk: int | None) -> str:
    if chunk is None:
        return "while prompts were computed."
    if chunk <= 0:
        return "while prompts were computed in one piece (no chunks)."
    return f"while prompts were computed in chunks of {chunk:,} tokens."


def _action(case: Case, event: Event, chunk: int | None) -> Action:
    if event.values.get("workspace"):
        return larger_workspace("--chunked-prefill-size")
    doing = event.values.get("doing")
    note = {
        "logprobs": " The failed step computed logprobs of prompts: request fewer of them.",
        "vision": " The failed step encoded images: limit their number or size.",
    }.get(str(doing), "")
    if chunk is None:
        return Action(
            f"Lower --chunked-prefill-size to {USUAL_CHUNK}, or to {LEAST_CHUNK} if it is "
            f"{USUAL_CHUNK} already: activations need memory in proportion to the tokens of a "
            f"chunk. No line that was read names its size.{note}",
            "--chunked-prefill-size",
            "decrease",
            USUAL_CHUNK,
        )
    if chunk <= 0:
        return Action(
            f"Set --chunked-prefill-size to {USUAL_CHUNK}: now each prompt is computed in one "
            f"piece, however long it is.{note}",
            "--chunked-prefill-size",
            "set",
            USUAL_CHUNK,
        )
    if chunk > LEAST_CHUNK:
        value = max(LEAST_CHUNK, chunk // 2)
        return Action(
            f"{change('decrease', '--chunked-prefill-size', value, chunk)}: activations need "
            "memory in proportion to the tokens of a chunk. If that is not enough, lower "
            f"--mem-fraction-static as well.{note}",
            "--chunked-prefill-size",
            "decrease",
            value,
        )
    return lower_fraction(
        case,
        (tried_gb(event) or 1.0) + 2.0,
        f": chunks of {chunk:,} tokens are already small, so the KV pool must leave more memory "
        f"free.{note}",
    )


def _effect(action: Action, chunk: int | None) -> Effect | None:
    if action.flag != "--chunked-prefill-size" or not chunk or chunk <= 0 or not action.value:
        return None
    part = action.value / chunk
    return estimate(
        "the peak memory of activations",
        part,
        part,
        1.0,
        f"it is proportional to the chunk size: {action.value:,} instead of {chunk:,} tokens",
    )


CHECK = Check(
    cause="oom-prefill",
    title="Memory runs out during prefill",
    find=find,
    meaning="Outside the KV pool, a step needs memory for its activations, in proportion to the "
    "tokens that it computes. Prefill computes thousands of prompt tokens at once, so it needs the "
    "most. The server starts well and fails at the first prefill batch that is large enough.",
    rule="A memory allocation failed after the server was ready or had run batches, and the "
    "message or its traceback shows a prefill. Without a traceback, the last batch line before it "
    "decides, and so does the size of the allocation if it is too large for a decode step (more "
    "than 10 MiB for each running request); the doctor is then less sure.",
    counter_evidence="If no batch had run and there was no ready line, the cause is oom-init. If "
    "the traceback shows a decode step, it is oom-decode. An error after which the server goes on "
    "for more than 30 s does not count.",
    advice="Lower --chunked-prefill-size (set it if prompts are not split); if chunks are "
    "small already, lower --mem-fraction-static.",
    guide="All guides: if prefill runs out of memory, lower --chunked-prefill-size to 4096 or "
    "2048; lowering --mem-fraction-static helps both prefill and decode. Prompt logprobs and "
    "images need memory that neither option limits (sglang#2607).",
    equation="new chunk size = half of today's, at least 2048; 4096 if prompts are not split, or "
    "if no line tells how. If it is 2048 already: --mem-fraction-static - (failed allocation + 2 "
    "GB) / memory of the device",
    picture="""\
free when ready           [......6 GB......]
prefill of 8192 tokens    [############]####   needs more than is free
prefill of 4096 tokens    [######..........]""",
)
