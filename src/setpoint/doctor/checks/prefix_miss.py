"""prefix-miss: prompts share prefixes, but most of them are computed again."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from setpoint.core.moments import Moment
from setpoint.doctor.case import Case
from setpoint.doctor.checks.check import Check
from setpoint.doctor.checks.common import confidence, estimate, lines_on, percent, quote
from setpoint.doctor.checks.hit_rates import Collapse, collapse_of, hit_rate
from setpoint.doctor.checks.prompts import whole_prompts
from setpoint.doctor.findings import Action, Finding, RuledOut
from setpoint.doctor.load import Load
from setpoint.doctor.observations import Evidence

SHARED = 0.4
"""A batch that finds at least this share of its prompts in the cache has shared prefixes."""
MISSED = 0.1
MIN_SHARED = 0.15
"""Least share of batches with shared prefixes …"""
MIN_MISSED = 0.5
"""… and of batches that find nothing. The order of requests decides which they are."""
MAX_HIT_RATE = 0.4
MIN_BATCHES = 10
MIN_QUEUED = 0.5
CACHE_ORDERS = ("lpm", "dfs-weight", "hrrn", "shortest-prefill-first")
LPM_LIMIT = 128
MIN_TEMPLATE = 1000
"""Prompts of so many tokens have a common part that is worth a cache under load."""
ALIKE = 0.1
MIN_ALIKE = 0.6
"""Share of the prompts that are within ``ALIKE`` of the usual length."""
TOGETHER = 3
"""Prompts of one batch, at most: the mean length of many tells nothing of each."""


def find(case: Case) -> Finding | None:
    if not case.has_load:
        return None
    if case.option("disable_radix_cache") is True:
        return switched_off(case)
    return _collapsed(case) or _out_of_order(case)


def _collapsed(case: Case) -> Finding | None:
    """The finding if prefixes were found at first, but later not any more, because other requests
    evict them before they are used again."""
    found = collapse_of(case)
    if found is None:
        return None
    late = Load(tuple(found.late), (1.0,) * len(found.late))
    queued = late.share(lambda moment: (moment.queue or 0.0) >= 1)
    saved = (1 - found.before) / (1 - found.after)
    return Finding(
        cause="prefix-miss",
        confidence=confidence(case, 0.9, late, 0.9 if queued >= MIN_QUEUED else 0.8),
        summary="Shared prefixes are computed again: the prefix cache supplied "
        f"{percent(found.before)} of the prompt tokens up to line {found.early[-1].line}, but only "
        f"{percent(found.after)} after it. Prefixes are evicted before they are used again.",
        evidence=_ends_of(found.early) + _ends_of(found.late) + lines_on(case, "schedule_policy"),
        action=_keep(case, queued),
        effect=estimate(
            "prompt tokens to compute",
            saved,
            (1 + saved) / 2,
            1.0,
            f"if {percent(found.before)} of them came from the cache again, instead of "
            f"{percent(found.after)}",
        ),
        ruled_out=_not_the_load(case, found),
        risk="Requests without a cached prefix wait longer than in order of arrival."
        if queued >= MIN_QUEUED
        else "The second cache takes main memory, and copying from it takes time.",
        verify="In the prefill lines, #cached-token rises and #new-token falls, as at the "
        "beginning.",
        falsify="The later requests come from other users or another application, which share "
        "nothing with each other.",
        # Of an excerpt, the lines before and after prove it together.
        share=1.0
        if case.is_excerpt
        else round(len(found.late) / (len(found.early) + len(found.late)), 3),
    )


def _ends_of(moments: Sequence[Moment]) -> tuple[Evidence, ...]:
    return quote(Load(tuple(moments), (1.0,) * len(moments)), 2)


def _keep(case: Case, queued: float) -> Action:
    """The action that keeps prefixes until they are used again: another order of requests, or more
    room."""
    policy = case.option("schedule_policy") or _default_policy(case)
    if queued >= MIN_QUEUED and policy not in CACHE_ORDERS:
        return Action(
            "Set --schedule-policy to lpm (longest prefix match): of the requests that wait, those "
            "whose prefix is in the cache then go first, before it is evicted. It has an effect "
            f"while at most {LPM_LIMIT} requests wait. If that is not enough, give the cache more "
            "room (--enable-hierarchical-cache, a larger KV pool), or send the requests of one "
            "conversation to the same replica.",
            "--schedule-policy",
            "set",
            "lpm",
        )
    order = (
        f"The order of requests (--schedule-policy {policy}) already prefers cached prefixes"
        if queued >= MIN_QUEUED
        else "No queue is there to be sorted"
    )
    if case.facts.engine == "setpoint":
        return Action(
            f"Give the cache more room with a larger KV pool (--max-total-tokens). {order}, so "
            "--schedule-policy would not help."
        )
    return Action(
        "Give the cache more room: set --enable-hierarchical-cache, which keeps evicted prefixes "
        f"in main memory, or enlarge the KV pool. {order}, so --schedule-policy would not help. "
        "With several replicas, send the requests of one conversation to the same one.",
        "--enable-hierarchical-cache",
        "set",
        True,
    )


def _not_the_load(case: Case, found: Collapse) -> tuple[RuledOut, ...]:
    new = [sum(m.new_tokens for m in part) / len(part) for part in (found.early, found.late)]
    return (
        RuledOut(
            "client-bound",
            "What changed is not how many requests arrive: a prefill batch now computes "
            f"{new[1]:,.0f} tokens instead of {new[0]:,.0f}.",
        ),
        RuledOut(
            "kv-full",
            "Prompts that the cache supplied shared their memory; now each request holds a copy.",
        ),
        RuledOut(
            "healthy",
            "Prompts without shared prefixes would have found nothing at the beginning either.",
        ),
    )


def _out_of_order(case: Case) -> Finding | None:
    prefills = case.load.where(lambda m: m.num_prefill > 0 and m.new_tokens + m.cached_tokens > 0)
    missed = prefills.where(lambda moment: _hit_rate(moment) <= MISSED)
    shared = prefills.where(lambda moment: _hit_rate(moment) >= SHARED)
    rate = hit_rate(prefills.moments)
    count = max(len(prefills), 1)
    queued = prefills.share(lambda moment: (moment.queue or 0.0) >= 1)
    if len(prefills) < MIN_BATCHES or rate > MAX_HIT_RATE or queued < MIN_QUEUED:
        return None
    if len(shared) < MIN_SHARED * count or len(missed) < MIN_MISSED * count:
        return None
    policy = case.option("schedule_policy") or _default_policy(case)
    if policy in CACHE_ORDERS:
        return None
    best = shared.median(_hit_rate) or SHARED
    saved = (1 - rate) / max(1 - min(best, 0.95), 0.05)
    return Finding(
        cause="prefix-miss",
        confidence=confidence(case, min(1.0, len(missed) / count + 0.2), prefills, 0.9),
        summary=f"Shared prefixes are computed again: the prefix cache supplies {percent(rate)} of "
        f"the prompt tokens overall, but {percent(best)} of them in {len(shared):,} of {count:,} "
        f"prefill batches and at most {percent(MISSED)} in {len(missed):,}.",
        evidence=quote(shared, 2) + quote(missed, 2) + lines_on(case, "schedule_policy"),
        action=Action(
            "Set --schedule-policy to lpm (longest prefix match): requests whose prefix is in the "
            "cache then go first, before it is evicted. It has an effect while at most "
            f"{LPM_LIMIT} requests wait; limit a longer queue with --max-queued-requests.",
            "--schedule-policy",
            "set",
            "lpm",
        ),
        effect=estimate(
            "prompt tokens to compute",
            1 / saved,
            (1 + 1 / saved) / 2,
            1.0,
            f"if all batches found {percent(best)} in the cache, as the better ones do, instead of "
            f"{percent(rate)} overall",
        ),
        ruled_out=(
            RuledOut(
                "prefill-budget",
                "Prompt tokens that the prefix cache supplies need not be computed in any batch.",
            ),
            RuledOut(
                "healthy",
                "Prompts without shared prefixes would find nothing in any batch, and a common "
                "system prompt would give all batches the same share. Here the shares differ: "
                f"{percent(SHARED)} or more in {len(shared):,} batches, {percent(MISSED)} or less "
                f"in {len(missed):,}.",
            ),
        ),
        risk="Requests without a cached prefix wait longer than in order of arrival.",
        verify="In the prefill lines, #cached-token rises and #new-token falls.",
        falsify="The shares stay the same. Then the misses are the first requests with their "
        "prefix, or running requests evict the prefixes, and a larger KV pool would help.",
        share=len(missed) / count,
    )


def switched_off(case: Case) -> Finding | None:
    """Without a cache nothing shows shared prefixes but lengths: prompts of one long system prompt
    or template differ by a few tokens."""
    prompts = [
        each for load in case.loads.values() for each in whole_prompts(load.moments, case, TOGETHER)
    ]
    usual = statistics.median(length for length, _ in prompts) if prompts else 0.0
    if len(prompts) < MIN_BATCHES or usual < MIN_TEMPLATE:
        return None
    alike = [moment for length, moment in prompts if abs(length - usual) <= ALIKE * usual]
    prefills = case.load.where(lambda moment: moment.num_prefill > 0)
    queued = prefills.share(lambda moment: (moment.queue or 0.0) >= 1)
    busy = sum(prefills.weights) / (sum(case.load.weights) or 1.0)
    if len(alike) < MIN_ALIKE * len(prompts) or max(queued, busy) < MIN_QUEUED:
        return None
    is_queue = queued >= MIN_QUEUED
    return Finding(
        cause="prefix-miss",
        confidence=confidence(case, len(alike) / len(prompts), prefills, 0.8),
        summary=f"The prefix cache is switched off, and {percent(len(alike) / len(prompts))} of "
        f"the prompts have nearly the same {usual:.0f} tokens, as a common beginning makes them: "
        "it is computed again for each request "
        + (
            "while others wait."
            if is_queue
            else f"and prefill takes {percent(busy)} of the time under load."
        ),
        evidence=lines_on(case, "disable_radix_cache")
        + quote(Load(tuple(alike), (1.0,) * len(alike))),
        action=Action(
            "Start the server without --disable-radix-cache: a common beginning is then computed "
            "once.",
            "--disable-radix-cache",
            "set",
            False,
        ),
        effect=estimate(
            "prompt tokens to compute",
            0.1,
            0.5,
            1.0,
            "a log without a cache does not tell how much of the prompts is common",
        ),
        ruled_out=(
            RuledOut(
                "kv-conservative",
                "Each request computes the common part before it runs, and holds its own copy.",
            ),
        ),
        risk="None to speak of if prompts share something; else the cache's bookkeeping costs a "
        "little CPU time.",
        verify="#cached-token is above 0 in most prefill lines, and #queue-req falls.",
        falsify="#cached-token stays near 0: then the prompts have only their length in common.",
        share=round(max(queued, busy), 3),
    )


def _hit_rate(moment: Moment) -> float:
    return hit_rate([moment])


def _default_policy(case: Case) -> str:
    """The server's default policy: servers of 2024 sorted by longest prefix match."""
    old = any("2024" in source.generation for source in case.seen.sources)
    return "lpm" if old else "fcfs"


CHECK = Check(
    cause="prefix-miss",
    title="Shared prefixes are computed again",
    find=find,
    meaning="The prefix cache keeps keys and values of earlier prompts as long as memory allows. A "
    "request that begins like an earlier one (the same document, conversation or few-shot "
    "examples) computes only the rest of its prompt, if that beginning is still in the cache. In "
    "order of arrival, requests of different groups alternate, and each group evicts the prefix of "
    "the next.",
    rule="In the course of the source, the share of prompt tokens that the prefix cache supplies "
    "falls from 35 % or more to at most 25 % and to less than half, stays there, and prompts are "
    "as long as before. In an excerpt, three batches before, with 70 % or more, and three after "
    "are enough. Or: while requests wait, at least 15 % of the prefill batches find 40 % "
    "or more of their prompt tokens in the prefix cache, at least half find 10 % or less, and "
    "overall at most 40 % are found; and the scheduling policy takes requests in order of "
    "arrival. Or the prefix cache is switched off, requests wait or prefill takes half of the "
    "time, and at least 60 % of the prompts are within 10 % of one length of 1,000 tokens or "
    "more.",
    counter_evidence="Prompts that share nothing find nothing in any batch. A common system prompt "
    "gives all batches the same share. In conversations, the first turns find nothing, but most "
    "requests are later turns. Another order gains nothing in these cases, and without a queue "
    "there is no order to choose. A cache that was flushed on purpose fills again.",
    advice="Set --schedule-policy lpm if requests wait; else give the cache more room "
    "(--enable-hierarchical-cache, a larger pool). If the cache is switched off, switch "
    "it on.",
    guide="SGLang's tuning guides of all years: if the workload has many shared prefixes, use "
    "--schedule-policy lpm (longest prefix match; the default in 2024, today it is fcfs, order of "
    "arrival). It sorts the queue for more cache hits, which costs scheduling time.",
    equation="tokens to compute = 1 - hit rate. If all batches had the hit rate of the better "
    "ones: (1 - better rate) / (1 - today's rate) of today's work",
    picture="""\
in order of arrival   A1 B1 C1 A2 B2 C2   all find their prefix evicted
sorted by lpm         A1 A2 B1 B2 C1 C2   A2, B2, C2 find it cached""",
)
