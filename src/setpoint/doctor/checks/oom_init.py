"""oom-init: memory runs out while the server starts."""

from __future__ import annotations

from setpoint.doctor.case import Case
from setpoint.doctor.checks.check import Check
from setpoint.doctor.checks.common import change, lines_on, once
from setpoint.doctor.checks.memory import (
    fraction,
    lower_fraction,
    ooms,
    total_gb,
    tried_gb,
    within,
)
from setpoint.doctor.findings import Action, Finding, RuledOut
from setpoint.doctor.observations import Event, Evidence

TITLE = "Memory runs out while the server starts"
MOST_WEIGHTS = 0.9
"""Largest share of a device that weights may take: with more, no useful pool remains."""
POOL_SHARE = 0.1
"""Least share of the device that the pool should get."""
NO_ROOM = (
    "increase --mem-fraction-static",
    "Raise --mem-fraction-static",
    "profiled value -",
    "negative dimension",
)
"""Messages of the server if the static share has no room for a pool."""
HELD_BY_OTHERS = 0.85
"""If less than this share of the device is free before the weights are loaded, another process uses
memory."""


def find(case: Case) -> Finding | None:
    found = ooms(case, "init")
    if not found:
        return None
    event = found[-1]
    stage = _stage(case, found)
    action, summary = _ACTIONS[stage](case, event)
    return Finding(
        cause="oom-init",
        confidence=0.95 if stage != "unknown" else 0.5,
        summary=summary,
        evidence=once(
            (
                Evidence(event.line, event.text),
                *lines_on(case, "mem_fraction_static"),
                *lines_on(case, "weights_gb", "total_gb"),
            )
        ),
        action=action,
        ruled_out=_alternatives(stage),
        risk="A larger share for weights and KV pool leaves less memory for activations: long "
        "prompts may then run out of memory."
        if action.direction == "increase" and action.flag == "--mem-fraction-static"
        else "The KV pool gets smaller, so fewer requests run at once."
        if action.flag == "--mem-fraction-static"
        else "",
        verify="The server starts and logs its ready line (max_total_num_tokens=…), which also "
        "shows how much memory is left.",
        falsify="The same error comes back with the new value. Then other processes use the "
        "device, or the model needs more devices.",
        share=1.0,
    )


def _stage(case: Case, found: list[Event]) -> str:
    texts = " ".join(event.text for event in found)
    doing = [str(event.values.get("doing", "")) for event in found]
    if any(words in texts for words in NO_ROOM):
        return "static"
    if "Free memory or use a smaller model" in texts:
        return "weights"
    left = case.facts.left_after_pool_gb
    if "graphs" in doing or left is not None or case.facts.available_gb is not None:
        return "graphs"
    if "pool" in doing or case.facts.weights_gb is not None:
        return "pool"
    told = "weights" in doing or case.facts.total_gb is not None or case.facts.options
    return "weights" if told else "unknown"


def _static(case: Case, event: Event) -> tuple[Action, str]:
    """The action and summary if the static share (weights and pool) has no room for a pool."""
    weights, total, present = case.facts.weights_gb, total_gb(case), fraction(case)
    value = None
    if weights is not None and total:
        if weights > MOST_WEIGHTS * total:
            return _weights(case, event)
        value = within(weights / total + POOL_SHARE)
    if present is not None:
        value = max(value or 0.0, within(present + 0.05))
    flag = "--mem-fraction-static"
    more = f"Raise {flag}" if value is None else change("increase", flag, value, present)
    sizes = f" ({weights:.1f} of {total:.1f} GB are weights)" if weights and total else ""
    return (
        Action(
            f"{more}. It is the share for weights and KV pool together, so here it must go up, "
            "not down.",
            flag,
            "increase",
            value,
        ),
        f"{TITLE}: the share of the device that {flag}"
        f"{'' if present is None else f' {present:g}'} allows has no room for a KV pool beside "
        f"the weights{sizes}.",
    )


def _weights(case: Case, event: Event) -> tuple[Action, str]:
    facts, total = case.facts, total_gb(case)
    free = facts.total_gb
    if free is not None and total and free < HELD_BY_OTHERS * total:
        return (
            Action(
                f"End the other processes that hold {total - free:.1f} GB of the device "
                "(nvidia-smi lists them), then start the server again."
            ),
            f"{TITLE}: another process uses the device, and only {free:.1f} of {total:.1f} GB were "
            "free before the weights were loaded.",
        )
    ranks = int(case.number("tp_size") or 1)
    return (
        Action(
            f"Spread the weights over more devices: raise --tp-size from {ranks} to {ranks * 2}. "
            "With the same devices, quantize the weights (--quantization fp8 halves a 16-bit "
            "model). --mem-fraction-static does not help.",
            "--tp-size",
            "increase",
            ranks * 2,
        ),
        f"{TITLE}: the weights do not fit into the memory of "
        + (f"{ranks} devices" if ranks > 1 else "one device")
        + (f" of {total:.1f} GB." if total else "."),
    )


def _pool(case: Case, event: Event) -> tuple[Action, str]:
    tried = tried_gb(event) or 2.0
    return (
        lower_fraction(case, tried + 2.0, ", which makes the KV pool smaller."),
        f"{TITLE}: the KV pool does not fit. After the weights were loaded, an allocation of "
        f"{tried:.2f} GB failed.",
    )


def _graphs(case: Case, event: Event) -> tuple[Action, str]:
    sizes = case.facts.graph_batch_sizes
    asked = case.number("cuda_graph_max_bs")
    pool = case.facts.kv_gb
    if (pool is not None and pool < 2.0) or (asked is not None and asked > 256):
        largest = int(asked or (max(sizes) if sizes else 160))
        value = max(largest // 2, 8)
        action = Action(
            f"{change('decrease', '--cuda-graph-max-bs', value, asked)}: each captured batch size "
            "takes memory.",
            "--cuda-graph-max-bs",
            "decrease",
            value,
        )
    else:
        action = lower_fraction(
            case,
            max((tried_gb(event) or 0.0) * 2, 4.0),
            ", so that the KV pool leaves memory for the CUDA graphs. Or capture fewer graphs with "
            "a smaller --cuda-graph-max-bs.",
        )
    left = case.facts.left_after_pool_gb
    rest = "" if left is None else f", with {left:.2f} GB left after the KV pool"
    return action, f"{TITLE}: capturing the CUDA graphs failed{rest}."


def _unknown(case: Case, event: Event) -> tuple[Action, str]:
    """The action and summary if there is only the message, without a line of the start or a
    traceback."""
    action = lower_fraction(
        case,
        (tried_gb(event) or 1.0) + 2.0,
        ": the KV pool then leaves more memory free. If the weights are what does not fit (no line "
        '"Load weight end" comes before the error), use more devices or quantize the weights.',
    )
    return action, (
        "Memory runs out, probably while the server starts: nothing that was read comes before the "
        "error."
    )


_ACTIONS = {
    "unknown": _unknown,
    "static": _static,
    "weights": _weights,
    "pool": _pool,
    "graphs": _graphs,
}


def _alternatives(stage: str) -> tuple[RuledOut, ...]:
    runtime = "The server was not ready yet and had run no batch."
    found = [RuledOut("oom-prefill", runtime), RuledOut("oom-decode", runtime)]
    if stage == "static":
        found.append(
            RuledOut(
                "mem-headroom-low",
                "The message is about the share for weights and KV pool, not about the memory "
                "outside it.",
            )
        )
    return tuple(found)


CHECK = Check(
    cause="oom-init",
    title=TITLE,
    find=find,
    meaning="A server takes its memory in this order: weights, KV pool, CUDA graphs. Weights and "
    "KV pool together get the share of the device that --mem-fraction-static sets. The remedy "
    "depends on which of the three fails, and two remedies are opposites: if the weights nearly "
    "fill the share, the fraction must go up; if KV pool and graphs do not fit on the device, it "
    "must go down.",
    rule="A memory allocation failed before the ready line and before any batch. The message, its "
    "traceback and the start-up lines before it show what failed: the weights, if no line says "
    "that they are loaded; the KV pool, if no line says that it is allocated; otherwise the CUDA "
    "graphs. 'Please try to increase --mem-fraction-static' means that the share is too small, and "
    "so does a negative size of the KV pool (a 'profiled value' or a 'dimension' below 0).",
    counter_evidence="If a ready line or a batch comes before the error, the cause is oom-prefill "
    "or oom-decode, which have other remedies.",
    advice="Raise or lower --mem-fraction-static, depending on which part of the start failed. If "
    "that is not enough: more devices, smaller graphs, or quantized weights.",
    guide="The guides say: lower --mem-fraction-static against out-of-memory errors. The server's "
    "own message says: raise it (sglang#322, #4330). Both are right: the message is about a server "
    "that cannot start because the weights fill the share, the guides are about running servers.",
    equation="share too small: value = weights / memory of the device + 0.1\n"
    "KV pool: value = today's value - (failed allocation + 2 GB) / memory of the device\n"
    "CUDA graphs: value = today's value - 4 GB / memory of the device",
    picture="""\
device  [ weights | KV pool | graphs | free for activations ]
         <- mem-fraction-static ->
share too small: no room for a KV pool
share too large: no room for graphs""",
)
