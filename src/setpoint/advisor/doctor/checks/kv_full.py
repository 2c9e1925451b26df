"""kv-full: the KV pool is too small for the load."""

from __future__ import annotations

from setpoint.advisor.doctor.case import Case
from setpoint.advisor.doctor.checks.check import Check
from setpoint.advisor.doctor.checks.common import (
    confidence,
    per_minute,
    percent,
    quote,
    quote_events,
    said,
    throughput_effect,
)
from setpoint.advisor.doctor.checks.kv_optimistic import EFFECTIVE, retracts_often
from setpoint.advisor.doctor.equations import GOOD_USAGE, mem_fraction_for, rounded
from setpoint.advisor.doctor.findings import Action, Finding, RuledOut
from setpoint.advisor.doctor.limits import binding_limit
from setpoint.advisor.doctor.load import Load

MIN_SHARE = 0.5
LONG_QUEUE = 4.0
"""Waiting requests for each running one: by Little's law a request waits this many times as long
as it is served."""
SMALL_BATCH = 64
"""Below this each further request in a batch costs next to nothing: if the pool could not hold one
more even without a reserve, a queue as long as the batch is reason enough."""
GROWS = 1.3
FALLS = 0.8


def find(case: Case) -> Finding | None:
    if not case.has_load:
        return None
    full = case.decoding.where(lambda moment: binding_limit(moment, case.limits) == "kv-full")
    share = sum(full.weights) / (sum(case.decoding.weights) or 1.0)
    usage = full.median(lambda moment: moment.usage)
    running = full.median(lambda moment: moment.running)
    queue = full.median(lambda moment: moment.queue)
    if usage is None or not running or not queue:
        return None
    if retracts_often(case) and case.conservativeness < EFFECTIVE:
        return None  # the estimate is wrong first of all: kv-optimistic
    reason = _reserved(case) or _too_small(full, share, running, queue)
    if reason is None:
        return None
    share = max(share, MIN_SHARE)
    growth = min(2.0, (running + queue) / running)
    action = _action(case, growth)
    return Finding(
        cause="kv-full",
        confidence=confidence(case, share, full, 0.92),
        summary=f"The KV pool is too small for the load: {percent(usage)} of it is in use, "
        f"{running:.0f} requests run, and {reason}.",
        evidence=quote(full)
        + quote_events(case, "retraction", 1)
        + said(case, "max_total_num_tokens"),
        action=action,
        effect=throughput_effect(case, running, growth),
        ruled_out=_alternatives(case, usage),
        risk="Keys and values in 8 bits change outputs slightly: compare answers before it serves "
        "clients."
        if action.flag == "--kv-cache-dtype"
        else "Memory that the pool takes is missing for activations: watch for out-of-memory "
        "errors in long prefills.",
        verify="max_total_num_tokens of the ready line has grown, #running-req rises with it, and "
        "#queue-req falls.",
        falsify="The queue does not shrink with a larger pool: then it grows because more arrives "
        "than this machine can compute.",
        share=round(share, 3),
    )


def _reserved(case: Case) -> str | None:
    """Requests are thrown back although every token that may come is reserved."""
    if not retracts_often(case):
        return None
    return (
        f"there are {per_minute(case)} although --schedule-conservativeness "
        f"{case.conservativeness:g} reserves every token that may come"
    )


def _too_small(full: Load, share: float, running: float, queue: float) -> str | None:
    """Why the queue is more than a well-used pool explains; None: it is not."""
    trend = full.trend(lambda moment: moment.queue)
    if share < MIN_SHARE or trend < FALLS:
        return None
    if trend >= GROWS and queue >= max(0.25 * running, 4):
        return (
            f"the queue grows (median {queue:.0f}, in the last third {trend:.1f} times the first)"
        )
    usage = full.median(lambda moment: moment.usage) or 0.0
    no_room = running < SMALL_BATCH and usage + usage / running >= 1
    if queue >= LONG_QUEUE * running or (no_room and queue >= running):
        return (
            f"{queue:.0f} wait: a request waits {queue / running:.1f} times as long as it is served"
        )
    return None


def _action(case: Case, growth: float) -> Action:
    tokens = case.facts.max_total_num_tokens
    asked = case.number("max_total_tokens")
    if tokens and asked and tokens >= 0.98 * asked:
        value = rounded(tokens * growth)
        return Action(
            f"Start the server with --max-total-tokens {value}, or without that option: it, and "
            "not the memory, limits the pool today.",
            "--max-total-tokens",
            "increase",
            value,
        )
    fraction = mem_fraction_for(
        case.number("mem_fraction_static"), case.facts.available_gb, case.facts.total_gb
    )
    if fraction is not None:
        return Action(
            f"Start the server with --mem-fraction-static {fraction:g}: "
            f"{case.facts.available_gb:.1f} GB are free when it is ready.",
            "--mem-fraction-static",
            "increase",
            fraction,
        )
    dtype = str(case.option("kv_cache_dtype", "auto"))
    if "fp8" not in dtype and "fp4" not in dtype:
        return Action(
            "Start the server with --kv-cache-dtype fp8_e4m3: the same memory holds twice the "
            "tokens of a 16-bit cache. If outputs must not change, add a replica instead.",
            "--kv-cache-dtype",
            "set",
            "fp8_e4m3",
        )
    return Action(
        "Add a replica behind a router, or a device with more memory: keys and values are small "
        "already, and no memory is left for them."
    )


def _alternatives(case: Case, usage: float) -> tuple[RuledOut, ...]:
    why = [
        RuledOut(
            "kv-conservative",
            f"The median usage is {usage:.2f}, so that at most {percent(1 - usage)} can be held "
            f"back; the aim is {GOOD_USAGE}.",
        ),
        RuledOut("kv-optimistic", f"There are {per_minute(case)}."),
    ]
    if case.limits.slots:
        most = case.decoding.most(lambda moment: moment.running) or 0.0
        why.append(
            RuledOut("seq-cap", f"At most {most:.0f} of {case.limits.slots:.0f} slots are used.")
        )
    if case.facts.available_gb is not None:
        why.append(
            RuledOut(
                "mem-underused", f"{case.facts.available_gb:.1f} GB are free when it is ready."
            )
        )
    return tuple(why)


CHECK = Check(
    cause="kv-full",
    title="The KV pool is too small for the load",
    find=find,
    meaning="Each running request holds keys and values of all its tokens. The pool is full of "
    "them, the estimate of the scheduler is right, and still more requests wait than run. Options "
    "of the scheduler can only choose who waits; what helps is more pool, smaller keys and values, "
    "shorter requests, or another replica.",
    rule="In at least half of the loaded time requests wait at a usage of 0.9 or more (or one at "
    "which an average request would not fit), the queue does not shrink, and one of these holds: "
    "it grows by 30 % or more from the first to the last third; at least four times as many "
    "requests wait as run; fewer than 64 run, as many wait, and an average request more would "
    "not fit even without a reserve. Or retractions "
    "go on although the conservativeness is at its maximum.",
    counter_evidence="A full pool with a moderate queue is the state that the guides aim at "
    "(healthy), and so is a queue that shrinks, as that of an offline batch. Much free memory when "
    "the server is ready makes mem-underused the cause.",
    guide="SGLang's tuning guides, 2025 and 2026: the larger the KV pool, the more requests can "
    "run; set --mem-fraction-static as high as activations allow (5 to 8 GB left). That of 2026: "
    "quantize the cache with --kv-cache-dtype fp8_e4m3. All of them: favour data parallelism.",
    equation="Little's law: waiting time / serving time = waiting / running requests. A pool of "
    "f times the tokens runs f times the requests, f = min(2, (running + waiting) / running).",
    picture="""\
queue                        running              KV pool
[################## 150 ] -> [#### 30 ]           [############] 0.98
      grows                   slots are free       nothing is free""",
)
