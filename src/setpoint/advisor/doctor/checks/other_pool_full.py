"""other-pool-full: a further pool, of sliding windows or of states, is full."""

from __future__ import annotations

from setpoint.advisor.doctor.case import Case
from setpoint.advisor.doctor.checks.check import Check
from setpoint.advisor.doctor.checks.common import (
    confidence,
    percent,
    quote,
    throughput_effect,
)
from setpoint.advisor.doctor.findings import Action, Finding, RuledOut
from setpoint.advisor.doctor.limits import OTHER_FULL, binding_limit, other_pool

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
        summary=f"The {name} pool is full ({percent(other)}) while the main KV pool is not "
        f"({percent(usage)}): requests wait in {percent(share)} of the loaded time.",
        evidence=quote(full),
        action=_action(case, name, other, usage),
        effect=throughput_effect(case, running, min(other / max(usage, 0.25), 2.0)),
        ruled_out=(
            RuledOut(
                "kv-conservative",
                f"Usage of the main pool is {usage:.2f}, but {name} usage is {other:.2f}: memory "
                "is lacking, not released by caution.",
            ),
        ),
        risk="The main pool becomes smaller in exchange.",
        verify=f"{name} usage and token usage are of similar size, and #running-req rises.",
        falsify=f"#running-req stays where it is although {name} usage has fallen below 0.9.",
        share=round(share, 3),
    )


def _action(case: Case, name: str, other: float, usage: float) -> Action:
    if name not in SPLITS:
        return Action(f"Give the {name} pool more memory; no option for it is known here.")
    flag, option, default, most = SPLITS[name]
    present = case.number(option) or default
    value = round(min(present * other / max(usage, 0.5), most), 2)
    if value <= present:
        return Action(f"Add memory for the {name} pool, or a replica: {flag} is at its maximum.")
    return Action(
        f"Start the server with {flag} {value:g} (now {present:g}): both pools then fill up "
        "together.",
        flag,
        "increase",
        value,
    )


CHECK = Check(
    cause="other-pool-full",
    title="A further pool is full",
    find=find,
    meaning="Models with sliding windows or with recurrent states keep a second pool for these "
    "layers. Its size is set when the server starts, as a share. If it is full, no request is "
    "admitted, however empty the main pool is.",
    rule=f"In at least 40 % of the loaded time requests wait while the usage of a further pool is "
    f"{OTHER_FULL} or more and the main one's is below 0.9.",
    counter_evidence="Both full is a full pool (kv-full).",
    guide="The guides do not have it: they were written before such models. It is among the causes "
    "of a low usage that look like too much caution of the scheduler.",
    equation="ratio = today's ratio x usage of the full pool / usage of the main pool",
    picture="""\
full token usage  [#####.......] 0.41
swa token usage   [############] 0.99    <- this one refuses requests""",
)
