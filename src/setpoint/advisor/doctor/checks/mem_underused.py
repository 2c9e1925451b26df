"""mem-underused: memory lies idle that the full KV pool could have."""

from __future__ import annotations

from setpoint.advisor.doctor.case import Case
from setpoint.advisor.doctor.checks.check import Check
from setpoint.advisor.doctor.checks.common import (
    confidence,
    once,
    percent,
    quote,
    said,
    throughput_effect,
)
from setpoint.advisor.doctor.checks.graph_miss import share_missed
from setpoint.advisor.doctor.checks.memory import (
    WANTED_FREE_GB,
    fraction,
    fraction_that_leaves,
    scaled,
    total_gb,
)
from setpoint.advisor.doctor.findings import Action, Finding, RuledOut
from setpoint.advisor.doctor.limits import FULL
from setpoint.advisor.doctor.load import Load

TOO_MUCH_GB = 10.0
"""From here on the guides call it too much, for a device of 80 GB."""
SMALL_DEVICE = 1.2
"""On smaller devices, graphs and activations take a larger part: more may be free in proportion."""
CPU_SHARE = 0.5
"""Memory of a machine belongs to others, too: only a fraction below this is called small."""
BINDS = 0.85
"""Usage at which admission stops for lack of memory: the rest is the reserve."""


def find(case: Case) -> Finding | None:
    available, total = case.facts.available_gb, total_gb(case)
    if not case.has_load or available is None:
        return None
    limit = scaled(TOO_MUCH_GB, total) * (SMALL_DEVICE if (total or 80.0) < 60 else 1.0)
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
        summary=f"{available:.1f} GB"
        + (f" of {total:.0f} GB" if total else "")
        + f" were free when the server was ready, while the KV pool is {percent(usage)} full and "
        f"about {queue:.0f} requests wait for it.",
        evidence=once(
            said(case, "available_gb") + said(case, "mem_fraction_static") + quote(full, 2)
        ),
        action=Action(
            "Start the server with --mem-fraction-static "
            + (f"{value}" if value is not None else "raised in steps of 0.01")
            + f", which leaves about {_free_afterwards(case, total):.1f} GB for activations and "
            "graphs.",
            "--mem-fraction-static",
            "increase",
            value,
        ),
        effect=throughput_effect(case, running, growth),
        ruled_out=(
            RuledOut(
                "kv-full",
                "The pool is full, but it need not be so small: memory of the device is free.",
            ),
            RuledOut(
                "kv-conservative",
                f"Usage is {usage:.2f}: a smaller reserve would gain little before retractions "
                "begin.",
            ),
        ),
        risk="Prefills need memory for activations: if long prompts fail with out-of-memory "
        "errors, go back by 0.01 to 0.02.",
        verify="max_total_num_tokens of the ready line rises, available memory falls to 5 to 8 GB, "
        "and more requests run.",
        falsify="max_total_num_tokens does not change: then --max-total-tokens or another option "
        "limits the pool.",
        share=round(share, 3),
    )


def _full(case: Case) -> Load:
    return case.decoding.where(lambda moment: bool(moment.queue) and (moment.usage or 0.0) >= BINDS)


def _limited_otherwise(case: Case, present: float | None) -> bool:
    """Another option than the fraction sizes the pool."""
    asked, tokens = case.number("max_total_tokens"), case.facts.max_total_num_tokens
    if asked and tokens and tokens >= 0.98 * asked:
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
    """How many times as many requests may run: as the pool grows, and as many as wait."""
    waiting = (running + queue) / running
    pool = case.facts.kv_gb
    if not pool:
        return min(waiting, 2.0)
    return min(waiting, (pool + available - _free_afterwards(case, total)) / pool)


CHECK = Check(
    cause="mem-underused",
    title="Memory lies idle while the KV pool is full",
    find=find,
    meaning="--mem-fraction-static is the share of the device for weights and KV pool together. "
    "What it leaves is for activations and graphs, which need 5 to 8 GB on a large device. Here "
    "much more is left, and the pool, which could have it, limits how many requests run.",
    rule="More than 10 GB of a device of 80 GB were free when the server was ready (in proportion "
    "on smaller devices, with a fifth on top), and in at least 40 % of the loaded time requests "
    f"wait while usage is {BINDS} or more.",
    counter_evidence="A pool that does not fill needs no more memory. --max-total-tokens limits "
    "the pool whatever the fraction is. Decode graphs that are missing need memory first "
    "(graph-miss). On a CPU free memory belongs to other programs, too: only a fraction below "
    f"{CPU_SHARE} that was given is called small.",
    guide="SGLang's tuning guides of 2025 and 2026: 5 to 8 GB free is good, at 10 to 20 GB raise "
    "--mem-fraction-static; the latter also says: raise it by 0.01 until memory runs out.",
    equation="value = present + (free - 6.5 GB) / device",
    picture=f"""\
today   [ weights | KV pool, full | ......... free ......... ]
after   [ weights | KV pool                        |  6.5 GB ]
usage counts as full from {FULL} on""",
)
