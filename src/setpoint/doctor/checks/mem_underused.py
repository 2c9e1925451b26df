"""mem-underused: memory lies idle that the full KV pool could have."""

from __future__ import annotations

from setpoint.doctor.case import Case
from setpoint.doctor.checks.check import Check
from setpoint.doctor.checks.common import (
    acting,
    change,
    confidence,
    fixed_share_of,
    lines_on,
    once,
    percent,
    quote,
    throughput_effect,
)
from setpoint.doctor.checks.graph_miss import share_missed
from setpoint.doctor.checks.memory import (
    WANTED_FREE_GB,
    fraction,
    fraction_that_leaves,
    is_held_small,
    scaled,
    total_gb,
)
from setpoint.doctor.findings import Action, Finding, RuledOut
from setpoint.doctor.load import Load

TOO_MUCH_GB = 10.0
"""From here on the guides call it too much, for a device of 80 GB."""
GOOD_GB = 8.0
"""What the guides call good on any device is not too much …"""
MIDDLE_GB = 32.0
"""… but on one that is smaller than this."""
SMALL_DEVICE = 1.2
"""On smaller devices, graphs and activations take a larger part: more may be free in proportion."""
CPU_SHARE = 0.5
"""Other programs use the memory of a machine, too: only a fraction below this counts as small."""
BINDS = 0.85
"""Usage at which admission stops because memory is short: the rest is the reserve."""


def find(case: Case) -> Finding | None:
    available, total = case.facts.available_gb, total_gb(case)
    if not case.has_load or available is None:
        return None
    limit = scaled(TOO_MUCH_GB, total) * (SMALL_DEVICE if (total or 80.0) < 60 else 1.0)
    if (total or 80.0) >= MIDDLE_GB:
        limit = max(limit, GOOD_GB)
    present = fraction(case)
    if available <= limit or _limited_otherwise(case, present):
        return None
    full = _full(case)
    share = sum(full.weights) / (sum(case.decoding.weights) or 1.0)
    usage, queue = full.median(lambda m: m.usage), full.median(lambda m: m.queue)
    if share < 0.4 or usage is None or not queue or share_missed(case) > 0.5:
        return None
    running = full.median(lambda moment: moment.running) or 1.0
    value = fraction_that_leaves(case, _free_afterwards(case, total))
    growth = _growth(case, available, total, running, queue)
    return Finding(
        cause="mem-underused",
        confidence=confidence(case, max(share, 0.9), full, 0.95),
        summary=f"Memory is left unused while the KV pool is full: {available:.1f} GB"
        + (f" of {total:.0f} GB" if total else "")
        + f" were free when the server was ready, but {percent(usage)} of the KV pool is in use "
        f"and about {acting(queue, 'request', 'wait')}.",
        evidence=once(
            lines_on(case, "available_gb") + lines_on(case, "mem_fraction_static") + quote(full, 2)
        ),
        action=Action(
            (
                "Raise --mem-fraction-static in steps of 0.01 until"
                if value is None
                else change("increase", "--mem-fraction-static", value, present) + ". Then"
            )
            + f" about {_free_afterwards(case, total):.1f} GB stay free for activations and "
            "graphs.",
            "--mem-fraction-static",
            "increase",
            value,
        ),
        effect=throughput_effect(fixed_share_of(case, running), growth),
        ruled_out=(
            RuledOut(
                "kv-full",
                "The KV pool is full, but it could be larger: memory of the device is free.",
            ),
            RuledOut(
                "kv-conservative",
                f"{percent(usage)} of the KV pool is in use: a smaller memory reserve would gain "
                "little before retractions begin.",
            ),
        ),
        risk="Activations need memory as well: if long prompts fail with out-of-memory errors, "
        "lower the value by 0.01 to 0.02.",
        verify="The ready line shows a larger max_total_num_tokens and about "
        f"{_free_afterwards(case, total):.1f} GB free, and more requests run (#running-req).",
        falsify="max_total_num_tokens in the ready line does not change. Then --max-total-tokens "
        "or another option limits the KV pool.",
        share=round(share, 3),
    )


def _full(case: Case) -> Load:
    return case.decoding.where(lambda moment: bool(moment.queue) and (moment.usage or 0.0) >= BINDS)


def _limited_otherwise(case: Case, present: float | None) -> bool:
    """Whether another option than the fraction determines the size of the pool."""
    if is_held_small(case):
        return True
    if case.facts.device == "cpu":
        return case.number("mem_fraction_static") is None or (present or 1.0) >= CPU_SHARE
    return False


def _free_afterwards(case: Case, total: float | None) -> float:
    if case.facts.device == "cpu":
        return max(0.25 * (total or 16.0), 2.0)
    return scaled(WANTED_FREE_GB, total)


def _growth(
    case: Case, available: float, total: float | None, running: float, queue: float
) -> float:
    """The factor by which running requests may grow: as the pool grows, and by as many as wait."""
    waiting = (running + queue) / running
    pool = case.facts.kv_gb
    if not pool:
        return min(waiting, 2.0)
    return min(waiting, (pool + available - _free_afterwards(case, total)) / pool)


CHECK = Check(
    cause="mem-underused",
    title="Memory is left unused while the KV pool is full",
    find=find,
    meaning="--mem-fraction-static is the share of the device's memory that weights and KV pool "
    "get together. The rest is for activations and CUDA graphs, which need 5 to 8 GB on a large "
    "device. Here much more is left, while the size of the KV pool limits how many requests run.",
    rule="More than 10 GB of an 80 GB device were free when the server was ready (on smaller "
    "devices proportionally less, plus a fifth, but from 32 GB on at least 8 GB), and for at least "
    f"40 % of the time under load requests wait while {percent(BINDS)} or more of the KV pool is "
    "in use.",
    counter_evidence="A KV pool that does not fill up needs no more memory. If --max-total-tokens "
    "limits the pool, a larger fraction changes nothing. Missing decode graphs need the memory "
    "first (graph-miss). On a CPU, free memory may belong to other programs, so only an explicit "
    f"fraction below {CPU_SHARE} counts as small.",
    advice="Raise --mem-fraction-static, with the value.",
    guide="SGLang's tuning guides of 2025 and 2026: 5 to 8 GB free is good; with 10 to 20 GB free, "
    "raise --mem-fraction-static. The guide of 2026 adds: raise it by 0.01 until memory runs out.",
    equation="value = today's value + (free memory - 6.5 GB) / memory of the device",
    picture="""\
today   [ weights | KV pool, full | ......... free ......... ]
after   [ weights | KV pool                        |  6.5 GB ]""",
)
