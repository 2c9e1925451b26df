"""mem-headroom-low: hardly any memory is free outside weights, KV pool and graphs."""

from __future__ import annotations

from setpoint.doctor.case import Case
from setpoint.doctor.checks.check import Check
from setpoint.doctor.checks.common import change, events, lines_on, once
from setpoint.doctor.checks.memory import (
    WANTED_FREE_GB,
    fraction,
    fraction_that_leaves,
    scaled,
    total_gb,
)
from setpoint.doctor.findings import Action, Finding, RuledOut

TOO_LITTLE_GB = 4.5
"""The threshold for a device of 80 GB. The guides say 5, but call a log good that shows 4.64."""
CPU_SHARE = 0.03
SMALL_GB = 60.0
LARGE_CHUNK = 8192
"""The chunk size that SGLang chooses from 60 GB on. Activations are proportional to it, and smaller
devices get smaller chunks."""
MIDDLE_GB = 30.0
"""From this size of a device on, the threshold does not depend on the chunk size."""
NOTHING_GB = 0.5
"""Less than this is too little on any GPU."""
UNKNOWN_DEVICE_GB = 1.0


def find(case: Case) -> Finding | None:
    available, total = case.facts.available_gb, total_gb(case)
    if available is None or events(case, "oom"):
        return None
    limit = _limit(case, total)
    if available >= limit:
        return None
    present = fraction(case)
    value = fraction_that_leaves(case, max(scaled(WANTED_FREE_GB, total), limit))
    if value is None or (present is not None and value >= present):
        value = None if present is None else round(present - 0.02, 3)
    severity = 1 - max(available, 0.0) / limit
    if available < NOTHING_GB and case.facts.device != "cpu":
        severity = max(severity, 0.6)
    return Finding(
        cause="mem-headroom-low",
        confidence=round(0.62 + 0.35 * severity, 2),
        summary=f"Too little memory is free for activations: only {available:.2f} GB"
        + (f" of {total:.0f} GB" if total else "")
        + " were free when the server was ready, so a long prompt may run out of memory.",
        evidence=once(lines_on(case, "available_gb") + lines_on(case, "mem_fraction_static")),
        action=Action(
            (
                "Lower --mem-fraction-static"
                if value is None
                else change("decrease", "--mem-fraction-static", value, present)
            )
            + f", so that about {scaled(WANTED_FREE_GB, total):.1f} GB stay free for activations.",
            "--mem-fraction-static",
            "decrease",
            value,
        ),
        ruled_out=(RuledOut("oom-prefill", "No memory allocation has failed so far."),),
        risk="The KV pool gets smaller, so fewer requests run at once.",
        verify="The ready line (available_gpu_mem) shows about "
        f"{scaled(WANTED_FREE_GB, total):.1f} GB of free memory.",
        falsify="Several of the longest prompts that occur run at once without an error.",
    )


def _limit(case: Case, total: float | None) -> float:
    if case.facts.device == "cpu":
        return UNKNOWN_DEVICE_GB if total is None else min(CPU_SHARE * total, 2.0)
    chunk = case.facts.chunked_prefill_size or 0
    if total is None:
        return scaled(TOO_LITTLE_GB, SMALL_GB) if chunk >= LARGE_CHUNK else UNKNOWN_DEVICE_GB
    if total < MIDDLE_GB and 0 < chunk < LARGE_CHUNK:
        return scaled(TOO_LITTLE_GB, total) * chunk / LARGE_CHUNK
    return scaled(TOO_LITTLE_GB, total)


CHECK = Check(
    cause="mem-headroom-low",
    title="Too little memory is free for activations",
    find=find,
    meaning="Weights, KV pool and CUDA graphs take their memory once, when the server starts. "
    "Activations (the intermediate results of a step) take theirs in every step, most of all when "
    "long prompts are computed. If next to nothing is left for them, the server runs well until "
    "the first batch that needs more.",
    rule="Less than 4.5 GB of an 80 GB device were free when the server was ready. On smaller "
    "devices, the threshold is proportionally lower, below 30 GB also in proportion to the chunk "
    "size, because activations grow with it. This is a warning: it does not limit the "
    "server now. But if two fifths of that memory or more are missing, it comes before every cause "
    "whose remedy takes memory from the same rest: larger prefill batches, a larger KV pool, more "
    "CUDA graphs.",
    counter_evidence="An allocation has already failed: then oom-prefill or oom-decode says more.",
    advice="Lower --mem-fraction-static, with the value.",
    guide="SGLang's tuning guides of 2025 and 2026: if available_gpu_mem is below 5 GB, lower "
    "--mem-fraction-static; 5 to 8 GB is good. The guide's own example of a good log shows 4.64 "
    "GB, so this check begins at 4.5 GB.",
    equation="value = today's value - (6.5 GB - free memory) / memory of the device",
    picture="""\
[ weights | KV pool                                 |graphs|.]
                                     free for activations ^""",
)
