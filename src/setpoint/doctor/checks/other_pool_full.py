"""other-pool-full: a second memory pool, for sliding windows or recurrent states, is full."""

from __future__ import annotations

from setpoint.doctor.binding_limit import OTHER_FULL, binding_limit, other_pool
from setpoint.doctor.case import Case
from setpoint.doctor.checks.check import Check
from setpoint.doctor.checks.common import (
    as_typed,
    change,
    confidence,
    during,
    fixed_share_of,
    percent,
    quote,
    throughput_effect,
)
from setpoint.doctor.findings import Action, Finding, RuledOut

MIN_SHARE = 0.4
SPLITS = {
    "swa": ("--swa-full-tokens-ratio", "swa_full_tokens_ratio", 0.8, 1.0),
    "mamba": ("--mamba-full-memory-ratio", "mamba_full_memory_ratio", 0.9, 4.0),
}
"""Pool -> the option that divides memory between it and the main pool, its field name, SGLang's
default, and the largest value that makes sense."""


def find(case: Case) -> Finding | None:
    full = case.decoding.where(
        lambda moment: binding_limit(moment, case.limits) == "other-pool-full"
    )
    share = sum(full.weights) / (sum(case.decoding.weights) or 1.0)
    if not case.has_load or share < MIN_SHARE:
        return None
    name = next(pool for moment in full.moments if (pool := other_pool(moment)))
    other = full.median(lambda moment: moment.other_usage.get(name)) or 1.0
    usage = full.median(lambda moment: moment.usage) or 0.0
    running = full.median(lambda moment: moment.running) or 1.0
    return Finding(
        cause="other-pool-full",
        confidence=confidence(case, share, full, 0.92),
        summary=f"A second memory pool is full: {during(share)}, requests wait because "
        f"{percent(other)} of the {name} pool is in use, but only {percent(usage)} of the KV pool.",
        evidence=quote(full),
        action=_action(case, name, other, usage),
        effect=throughput_effect(fixed_share_of(case, running), min(other / max(usage, 0.25), 2.0)),
        ruled_out=(
            RuledOut(
                "kv-conservative",
                f"{percent(other)} of the {name} pool is in use: memory is really missing, not "
                "only reserved.",
            ),
        ),
        risk="The KV pool becomes smaller in exchange.",
        verify=f"{name} token usage and token usage are similar, and more requests run "
        "(#running-req).",
        falsify=f"The number of running requests (#running-req) does not rise although {name} "
        "token usage has fallen below 0.9.",
        share=round(share, 3),
    )


def _action(case: Case, name: str, other: float, usage: float) -> Action:
    if name not in SPLITS:
        return Action(f"Give the {name} pool more memory. The doctor knows no option for it.")
    flag, option, default, most = SPLITS[name]
    present = case.number(option) or default
    value = round(min(present * other / max(usage, 0.5), most), 2)
    if value <= present:
        return Action(
            f"Add a replica, or use a device with more memory: {flag} is already at its maximum, "
            f"{as_typed(present)}."
        )
    return Action(
        change("increase", flag, value, present) + ", so that both pools fill up together.",
        flag,
        "increase",
        value,
    )


CHECK = Check(
    cause="other-pool-full",
    title="A second memory pool is full",
    find=find,
    meaning="Models with sliding-window attention (swa) or recurrent states (mamba) keep a second "
    "memory pool for those layers. Its share of the memory is fixed when the server starts. If it "
    "is full, no request is admitted, however empty the KV pool is.",
    rule="For at least 40 % of the time under load, requests wait while "
    f"{percent(OTHER_FULL)} or more of a second pool and less than 90 % of the KV pool is in use.",
    counter_evidence="If both pools are full, the KV pool is too small (kv-full).",
    advice="Raise --swa-full-tokens-ratio or --mamba-full-memory-ratio, with the value; at its "
    "maximum, add a replica.",
    guide="The guides do not cover it: they are older than such models. It is one of the causes of "
    "a half-empty KV pool that can be mistaken for a scheduler that is too cautious "
    "(kv-conservative).",
    equation="ratio = today's ratio x usage of the full pool / usage of the KV pool",
    picture="""\
full token usage  [#####.......] 0.41    the KV pool
swa token usage   [############] 0.99    this one keeps requests out""",
)
