"""oom-init: memory runs out while the server starts."""

from __future__ import annotations

from setpoint.advisor.doctor.case import Case
from setpoint.advisor.doctor.checks.check import Check
from setpoint.advisor.doctor.checks.common import once, said
from setpoint.advisor.doctor.checks.memory import (
    fraction,
    lower_fraction,
    ooms,
    total_gb,
    tried_gb,
    within,
)
from setpoint.advisor.doctor.findings import Action, Finding, RuledOut
from setpoint.advisor.doctor.observations import Event, Evidence

MOST_WEIGHTS = 0.9
"""Share of a device that weights may take: with more, no useful pool remains."""
POOL_SHARE = 0.1
"""Share of the device that the pool should get at least."""
HELD_BY_OTHERS = 0.85
"""If less than this share of the device is free before the weights, another process has memory."""


def find(case: Case) -> Finding | None:
    found = ooms(case, "init")
    if not found:
        return None
    event = found[-1]
    stage = _stage(case, found)
    action, summary = _ACTIONS[stage](case, event)
    return Finding(
        cause="oom-init",
        confidence=0.95 if stage != "unknown" else 0.7,
        summary=summary,
        evidence=once(
            (
                Evidence(event.line, event.text),
                *said(case, "mem_fraction_static"),
                *said(case, "weights_gb", "total_gb"),
            )
        ),
        action=action,
        ruled_out=_alternatives(stage),
        risk="A larger share for weights and pool leaves less for activations: an out-of-memory "
        "error may follow in long prefills."
        if action.direction == "increase" and action.flag == "--mem-fraction-static"
        else "A smaller pool runs fewer requests at once."
        if action.flag == "--mem-fraction-static"
        else "",
        verify="The server reaches its ready line, which shows max_total_num_tokens and the memory "
        "that is left.",
        falsify="The same error with the changed value: then other processes use the device, or "
        "the model needs more devices.",
        share=1.0,
    )


def _stage(case: Case, found: list[Event]) -> str:
    texts = " ".join(event.text for event in found)
    doing = [str(event.values.get("doing", "")) for event in found]
    if "increase --mem-fraction-static" in texts or "Raise --mem-fraction-static" in texts:
        return "static"
    if "Free memory or use a smaller model" in texts:
        return "weights"
    if "graphs" in doing or case.facts.available_gb is not None:
        return "graphs"
    if "pool" in doing or case.facts.weights_gb is not None:
        return "pool"
    return "weights"


def _static(case: Case, event: Event) -> tuple[Action, str]:
    """The static share, weights and pool, has no room for a pool beside the weights."""
    weights, total, present = case.facts.weights_gb, total_gb(case), fraction(case)
    value = None
    if weights is not None and total:
        if weights > MOST_WEIGHTS * total:
            return _weights(case, event)
        value = within(weights / total + POOL_SHARE)
    if present is not None:
        value = max(value or 0.0, within(present + 0.05))
    shown = "a larger value" if value is None else f"{value}"
    why = "The weights do not leave room for a KV pool in the share of the device that "
    sizes = f" ({weights:.1f} of {total:.1f} GB are weights)" if weights and total else ""
    return (
        Action(
            f"Start the server with --mem-fraction-static {shown}. It counts weights and pool "
            "together, so that here it must go up, not down.",
            "--mem-fraction-static",
            "increase",
            value,
        ),
        f"{why}--mem-fraction-static"
        f"{'' if present is None else f' {present:g}'} gives them{sizes}.",
    )


def _weights(case: Case, event: Event) -> tuple[Action, str]:
    facts, total = case.facts, total_gb(case)
    free = facts.total_gb
    if free is not None and total and free < HELD_BY_OTHERS * total:
        return (
            Action(
                f"End the processes that hold {total - free:.1f} GB of the device (nvidia-smi "
                "names them), then start again."
            ),
            f"Another process uses the device: only {free:.1f} of {total:.1f} GB were free before "
            "the weights were loaded.",
        )
    ranks = int(case.number("tp_size") or 1)
    return (
        Action(
            f"Spread the weights over more devices: --tp-size {ranks * 2}. On the same devices, "
            "weights in 8 bits (--quantization fp8) take half the memory; --mem-fraction-static "
            "does not help.",
            "--tp-size",
            "increase",
            ranks * 2,
        ),
        "The weights do not fit into the memory of "
        + (f"{ranks} devices" if ranks > 1 else "one device")
        + (f" of {total:.1f} GB." if total else "."),
    )


def _pool(case: Case, event: Event) -> tuple[Action, str]:
    tried = tried_gb(event) or 2.0
    return (
        lower_fraction(case, tried + 2.0, "Start the server with {}: the pool is sized from it."),
        "The KV pool that --mem-fraction-static asks for does not fit: the allocation of "
        f"{tried:.2f} GB failed after the weights were loaded.",
    )


def _graphs(case: Case, event: Event) -> tuple[Action, str]:
    sizes = case.facts.graph_batch_sizes
    asked = case.number("cuda_graph_max_bs")
    pool = case.facts.kv_gb
    if (pool is not None and pool < 2.0) or (asked is not None and asked > 256):
        largest = int(asked or (max(sizes) if sizes else 160))
        value = max(largest // 2, 8)
        action = Action(
            f"Start the server with --cuda-graph-max-bs {value}: each captured batch size takes "
            "memory.",
            "--cuda-graph-max-bs",
            "decrease",
            value,
        )
    else:
        action = lower_fraction(
            case,
            max((tried_gb(event) or 0.0) * 2, 4.0),
            "Start the server with {}, so that the pool leaves memory for the decode graphs; or "
            "capture fewer of them with a smaller --cuda-graph-max-bs.",
        )
    left = case.facts.available_gb
    rest = "" if left is None else f": {left:.2f} GB were left after the KV pool"
    return action, f"Memory runs out while the decode graphs are captured{rest}."


_ACTIONS = {"static": _static, "weights": _weights, "pool": _pool, "graphs": _graphs}


def _alternatives(stage: str) -> tuple[RuledOut, ...]:
    runtime = "The server was not ready yet, and no batch had run."
    found = [RuledOut("oom-prefill", runtime), RuledOut("oom-decode", runtime)]
    if stage == "static":
        found.append(
            RuledOut(
                "mem-headroom-low",
                "The message is about the share for weights and pool, not about what is left "
                "outside it.",
            )
        )
    return tuple(found)


CHECK = Check(
    cause="oom-init",
    title="Memory runs out while the server starts",
    find=find,
    meaning="A server takes its memory in this order: weights, KV pool, decode graphs. The pool "
    "gets what is left of --mem-fraction-static x device after the weights. Which of the three "
    "fails decides the remedy, and two of the remedies are opposite: if the weights nearly fill "
    "the static share, the fraction must go up; if pool and graphs together fill the device, it "
    "must go down.",
    rule="An allocation failed before the ready line and before any batch. The stage follows from "
    "the message, the frames of its traceback, and the start-up lines that precede it: no line "
    "about loaded weights: the weights; weights but no memory pool: the pool; a memory pool: the "
    "decode graphs; 'Please try to increase --mem-fraction-static': the static share.",
    counter_evidence="A ready line or a batch before the error: then it is oom-prefill or "
    "oom-decode, with other remedies.",
    guide="The guides say to lower --mem-fraction-static against out-of-memory errors; the "
    "server's own message says to raise it (sglang#322, #4330). Both are right: the message is "
    "about the start of a server whose weights fill the share, the guides are about running "
    "servers.",
    equation="static share: value = weights / device + 0.1;  pool: value = present - (failed "
    "allocation + 2 GB) / device;  graphs: value = present - 4 GB / device",
    picture="""\
device  [ weights | KV pool | graphs | free for activations ]
         <- mem-fraction-static ->
too small a share: no pool.   too large: no room for graphs.""",
)
