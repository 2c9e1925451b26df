"""kv-full: the KV pool is too small for the load."""

from __future__ import annotations

import math
import statistics

from setpoint.core.moments import Moment
from setpoint.doctor.binding_limit import WHOLE, binding_limit, is_full
from setpoint.doctor.case import MANY_LINES, NEARLY, TIGHT, Case
from setpoint.doctor.checks.check import Check
from setpoint.doctor.checks.common import (
    change,
    confidence,
    counted,
    fixed_share_of,
    lines_on,
    per_minute,
    percent,
    quote,
    quote_events,
    sure_of,
    throughput_effect,
)
from setpoint.doctor.checks.kv_conservative import is_used_up, peak_usage
from setpoint.doctor.checks.kv_optimistic import EFFECTIVE, retracts_often
from setpoint.doctor.checks.memory import GUIDE_DEVICE_GB, is_held_small, total_gb
from setpoint.doctor.checks.prefill_budget import starves
from setpoint.doctor.equations import GOOD_USAGE, mem_fraction_for, rounded
from setpoint.doctor.findings import Action, Finding, RuledOut
from setpoint.doctor.load import Load

MIN_SHARE = 0.5
LEAST_QUEUE = 2.0
LEAST_RATIO = 0.3
"""Waiting requests for each running one: by Little's law a request waits this many times as long
as it is served. Below this, its place in a full pool is no reason to complain."""
PRIOR = 1.5
"""Doublings by which a full pool with a queue is rather healthy than too small: with 72 running
requests, as many waiting and a usage of 0.95. The guides call a queue healthy."""
EVEN_BATCH = 72.0
"""With a smaller batch it is more likely that the pool is too small, because each further request
would cost next to nothing; a larger one uses the device well, however many wait."""
EVEN_USAGE = 0.95
USAGE_STEP = 0.02
"""Difference in usage that doubles the odds: nothing is left even for a short request."""
ARTIFICIAL = 2.0
"""Doublings of the odds if an option keeps the pool small while memory is free."""
MUCH_LEFT = 0.15
"""Share of a device's memory from which much of it is free."""
UNLIMITED_RATIO = 8.0
"""Waiting requests as a multiple of running ones from which the pool is too small, however well the
device is used."""
GROWS = 1.6
FEW_RUNNING, ALL_USED = 3, 0.97
"""If so few requests use so much of the pool, their number cannot be the mistake."""
STEADY = 1.15
"""Below this growth, the number of running requests stays where it is."""
FALLS = 0.5
"""A queue that shrinks by this factor is that of an offline batch."""


def find(case: Case) -> Finding | None:
    if not case.has_load:
        return None
    waves = is_held_small(case) and is_used_up(case)
    grows = _grows_beside(case)
    full = case.decoding.where(lambda moment: _is_bound(case, moment, waves=waves, grows=grows))
    share = sum(full.weights) / (sum(case.decoding.weights) or 1.0)
    usage = _usage(case, full)
    running = full.median(lambda moment: moment.running)
    queue = full.median(lambda moment: moment.queue)
    if usage is None or not running or not queue:
        return None
    if retracts_often(case) and case.conservativeness < EFFECTIVE:
        return None  # the estimate is wrong first of all: kv-optimistic
    if starves(case):
        return None  # memory lets prompts in all the time: prefill-budget
    reason = _reserved(case) or _holds_few(case, usage, running)
    found = (0.9, reason) if reason else _too_small(case, full, share)
    if found is None:
        return None
    sure, reason = found
    share = max(share, MIN_SHARE)
    growth = min(2.0, (running + queue) / running)
    action = _action(case, growth)
    return Finding(
        cause="kv-full",
        confidence=confidence(case, share, full, min(sure, 0.92)),
        summary=f"The KV pool is too small for the load: {'when it is fullest, ' if waves else ''}"
        f"{percent(usage)} of it is in use by {counted(round(running), 'running request')}, "
        f"and {reason}.",
        evidence=quote(full)
        + quote_events(case, "retraction", 1)
        + lines_on(case, "max_total_num_tokens"),
        action=action,
        effect=throughput_effect(fixed_share_of(case, running), growth),
        ruled_out=_alternatives(case, usage),
        risk="An 8-bit KV cache changes outputs slightly: compare answers before it serves clients."
        if action.flag == "--kv-cache-dtype"
        else "A larger KV pool leaves less memory for activations: watch for out-of-memory errors "
        "when long prompts are computed.",
        verify="The ready line shows a larger max_total_num_tokens, more requests run "
        "(#running-req), and the queue (#queue-req) shrinks.",
        falsify="The queue does not shrink with a larger KV pool. Then more requests arrive than "
        "this machine can compute.",
        share=round(share, 3),
    )


def _usage(case: Case, full: Load) -> float | None:
    """The usage of a pool that lets nobody in: the usual one, or the highest if an option keeps it
    small and usage goes up and down, because requests begin and end together: they need it at
    their ends."""
    if is_held_small(case) and is_used_up(case):
        return peak_usage(case)
    return full.median(lambda moment: moment.usage)


def _grows_beside(case: Case) -> bool:
    """Whether the queue grows all the time beside a pool in which the reserve of the running
    requests leaves no room for the next one: usage is high and stays where it is, and their number
    as well."""
    tight = case.queued().where(
        lambda moment: (moment.usage or 0.0) >= TIGHT and moment.num_decode > 0
    )
    if len(tight) < MANY_LINES or len(tight) < NEARLY * len(case.decoding):
        return False
    running = tight.trend(lambda moment: moment.running)
    return tight.trend(lambda moment: moment.queue) >= GROWS and running < STEADY


def _is_bound(case: Case, moment: Moment, *, waves: bool, grows: bool) -> bool:
    """Whether requests wait beside a pool that is full, or that will be full at the top of a wave,
    or that lets nobody in while the queue grows. A full pool is the limit, too, if the prompts that
    it has room for fill their prefill batches."""
    limit = binding_limit(moment, case.limits)
    return limit in ("kv-full", "kv-conservative" if waves or grows else "kv-full") or (
        limit == "prefill-budget" and is_full(moment) and not case.limits.reasons
    )


def _reserved(case: Case) -> str | None:
    """The reason, if requests are retracted although all possible output tokens are reserved; else
    None."""
    if not retracts_often(case):
        return None
    return (
        f"there are {per_minute(case)} although --schedule-conservativeness "
        f"{case.conservativeness:g} already reserves all of max_new_tokens"
    )


def _holds_few(case: Case, usage: float, running: float) -> str | None:
    """The reason, if the pool is full with so few requests that the next token of one of them takes
    the pages of another; else None. No reserve helps where hardly two fit."""
    if running > FEW_RUNNING or usage < ALL_USED or not case.num_retractions:
        return None
    return "running requests are retracted although so few of them run"


def _too_small(case: Case, full: Load, share: float) -> tuple[float, str] | None:
    """The confidence that the queue is longer than a well-used pool explains, and the reason; None
    if it is not."""
    running = full.median(lambda moment: moment.running) or 1.0
    queue = full.median(lambda moment: moment.queue) or 0.0
    trend = full.trend(lambda moment: moment.queue) if len(full) >= MANY_LINES else 1.0
    if share < MIN_SHARE or trend < FALLS or queue < LEAST_QUEUE:
        return None
    grows = trend >= GROWS
    # The end of a growing queue shows how long it has become, and it goes on growing.
    end = full.moments[-max(len(full) // 3, 1) :] if grows else full.moments
    last = statistics.median(moment.queue or 0.0 for moment in end)
    odds = _doublings(case, full, running, last)
    if grows or trend < 1:
        odds += math.log2(min(trend, 8.0))
    if last < LEAST_RATIO * running or odds <= 0:
        return None
    if grows:
        return sure_of(odds), (
            f"the queue grows (median {counted(round(queue), 'request')}; its last third is "
            f"{trend:.1f} times as long as its first)"
        )
    return sure_of(odds), (
        f"{queue:,.0f} wait, so a request waits {queue / running:.1f} times as long as it runs"
    )


def _doublings(case: Case, full: Load, running: float, queue: float) -> float:
    """The logarithm to base 2 of the odds that the pool is too small, from how long requests wait,
    how few run, and how full the pool is."""
    usage = _usage(case, full) or 0.0
    ratio = queue / running
    odds = math.log2(ratio) + _within(math.log2(EVEN_BATCH / running), -2.0, 2.0)
    # What is left is less than a request has at its end, half of that in the mean.
    odds += _within((usage + WHOLE / 2 * usage / running - EVEN_USAGE) / USAGE_STEP, -2.0, 2.0)
    odds -= PRIOR
    if ratio >= UNLIMITED_RATIO:
        odds = max(odds, 1.0)
    return odds + (ARTIFICIAL if is_held_small(case) and _is_memory_left(case) else 0.0)


def _is_memory_left(case: Case) -> bool:
    """Whether much memory of a GPU is free while an option keeps the pool small."""
    available, total = case.facts.available_gb, total_gb(case)
    if case.facts.device == "cpu":
        return False
    return available is None or available > MUCH_LEFT * (total or GUIDE_DEVICE_GB)


def _within(value: float, least: float, most: float) -> float:
    return min(max(value, least), most)


def _action(case: Case, growth: float) -> Action:
    tokens = case.facts.max_total_num_tokens
    asked = case.number("max_total_tokens")
    if tokens and is_held_small(case):
        value = rounded(tokens * growth)
        return Action(
            f"{change('increase', '--max-total-tokens', value, asked)}, or remove the option: it "
            "limits the KV pool, not the memory.",
            "--max-total-tokens",
            "increase",
            value,
        )
    fraction = mem_fraction_for(
        case.number("mem_fraction_static"), case.facts.available_gb, case.facts.total_gb
    )
    if fraction is not None:
        return Action(
            change(
                "increase",
                "--mem-fraction-static",
                fraction,
                case.number("mem_fraction_static"),
            )
            + f": {case.facts.available_gb:.1f} GB are free once the server is ready.",
            "--mem-fraction-static",
            "increase",
            fraction,
        )
    dtype = str(case.option("kv_cache_dtype", "auto"))
    if "fp8" not in dtype and "fp4" not in dtype:
        return Action(
            "Set --kv-cache-dtype to fp8_e4m3: the same memory then holds twice the tokens of a "
            "16-bit KV cache. If outputs must not change, add a replica instead.",
            "--kv-cache-dtype",
            "set",
            "fp8_e4m3",
        )
    return Action(
        "Add a replica behind a router, or use a device with more memory. The KV cache is already "
        "quantized, and no memory is left for a larger pool."
    )


def _alternatives(case: Case, usage: float) -> tuple[RuledOut, ...]:
    why = [
        RuledOut(
            "kv-conservative",
            f"{percent(usage)} of the KV pool is in use (median), so the memory reserve holds back "
            f"at most {percent(1 - usage)}; {percent(GOOD_USAGE)} in use is the aim.",
        ),
        RuledOut("kv-optimistic", f"There are {per_minute(case)}."),
    ]
    if case.limits.slots:
        most = case.decoding.most(lambda moment: moment.running) or 0.0
        why.append(
            RuledOut(
                "seq-cap",
                f"At most {counted(round(most), 'request')} ran at once; the limit is "
                f"{case.limits.slots:,.0f}.",
            )
        )
    if case.facts.available_gb is not None:
        why.append(
            RuledOut(
                "mem-underused",
                f"{case.facts.available_gb:.1f} GB were free when the server was ready.",
            )
        )
    return tuple(why)


CHECK = Check(
    cause="kv-full",
    title="The KV pool is too small for the load",
    find=find,
    meaning="The KV pool holds the keys and values of every token of every running request. It is "
    "full of them, the scheduler's estimate is right, and still too many requests wait. Scheduler "
    "options only choose which requests wait. What helps is a larger pool, a quantized KV cache, "
    "shorter requests, or another replica.",
    rule="For at least half of the time under load, requests wait while 90 % or more of the KV "
    "pool is in use (or one more request would not fit by the time it ends), the queue does not "
    "shrink by half, and the pool is more likely too small than well used. These chances are even "
    "with about 72 running requests, as many waiting, and a usage of 0.95. Each of the following "
    "doubles the chance that the pool is too small: twice as many waiting requests for each "
    "running one, half as many running requests, and 2 points more usage. A queue that grows "
    "raises it, too. Retractions that go on although --schedule-conservativeness is at its "
    "effective maximum are another sign.",
    counter_evidence="A full KV pool with a moderate queue is the state that the guides aim at "
    "(healthy). So is a queue that shrinks, like that of an offline batch. If much memory is free "
    "once the server is ready, the cause is mem-underused.",
    advice="Raise --max-total-tokens or --mem-fraction-static where memory is left; else set "
    "--kv-cache-dtype fp8_e4m3, or add a replica.",
    guide="SGLang's tuning guides of 2025 and 2026: the larger the KV pool, the more requests can "
    "run; set --mem-fraction-static as high as activations allow (5 to 8 GB left free). The guide "
    "of 2026: quantize the KV cache with --kv-cache-dtype fp8_e4m3. All guides: prefer data "
    "parallelism.",
    equation="Little's law: time in the queue / time running = waiting requests / running "
    "requests. A pool with f times the tokens runs f times the requests; f = min(2, (running + "
    "waiting) / running).",
    picture="""\
queue                        running              KV pool
[################## 150 ] -> [#### 30 ]           [############] 98 %
      grows                   slots are free       nothing is free""",
)
