"""prefix-miss: prompts share prefixes, but most of them are computed again."""

from __future__ import annotations

from setpoint.advisor.doctor.case import Case
from setpoint.advisor.doctor.checks.check import Check
from setpoint.advisor.doctor.checks.common import confidence, estimate, percent, quote, said
from setpoint.advisor.doctor.findings import Action, Finding, RuledOut
from setpoint.advisor.doctor.load import Load
from setpoint.observe.moments import Moment

SHARED = 0.4
"""A batch that finds at least this share of its prompts in the cache has shared prefixes."""
MISSED = 0.1
MIN_SHARED = 0.15
"""Share of the batches that have them …"""
MIN_MISSED = 0.5
"""… and of those that find nothing, between which the order of requests decides."""
MAX_HIT_RATE = 0.4
MIN_BATCHES = 10
MIN_QUEUED = 0.5
CACHE_ORDERS = ("lpm", "dfs-weight", "hrrn", "shortest-prefill-first")
LPM_LIMIT = 128


def find(case: Case) -> Finding | None:
    if not case.has_load or case.option("disable_radix_cache") is True:
        return None
    prefills = case.load.where(lambda m: m.num_prefill > 0 and m.new_tokens + m.cached_tokens > 0)
    missed = prefills.where(lambda moment: _hit_rate(moment) <= MISSED)
    shared = prefills.where(lambda moment: _hit_rate(moment) >= SHARED)
    rate = overall_hit_rate(prefills)
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
        summary=f"Prompts share prefixes that are computed again: the cache supplies "
        f"{percent(rate)} of the prompt tokens, but {percent(best)} in {len(shared)} of {count} "
        f"prefill batches; {len(missed)} find at most {percent(MISSED)}.",
        evidence=quote(shared, 2) + quote(missed, 2) + said(case, "schedule_policy"),
        action=Action(
            "Start the server with --schedule-policy lpm: waiting requests whose prefix is cached "
            f"go first, before it is evicted. It sorts while at most {LPM_LIMIT} wait: limit the "
            "queue if it is longer.",
            "--schedule-policy",
            "set",
            "lpm",
        ),
        effect=estimate(
            "prompt tokens to compute",
            1 / saved,
            (1 + 1 / saved) / 2,
            1.0,
            f"if all batches found what the better ones find: (1 - {best:.2f}) / (1 - {rate:.2f})",
        ),
        ruled_out=(
            RuledOut(
                "prefill-budget",
                "Prompt tokens that the cache could supply need not be computed in any batch.",
            ),
            RuledOut(
                "healthy",
                "Prompts without shared prefixes would find nothing in all batches, and one system "
                f"prompt for all the same share in all; here shares differ: {len(shared)} batches "
                f"at {percent(SHARED)} or more, {len(missed)} at {percent(MISSED)} or less.",
            ),
        ),
        risk="Requests without a cached prefix wait longer than first come, first served.",
        verify="#cached-token rises against #new-token.",
        falsify="The shares stay as they are: then the misses are first requests of their kind, or "
        "the prefixes are evicted by running requests, and a larger pool is the remedy.",
        share=len(missed) / count,
    )


def _hit_rate(moment: Moment) -> float:
    total = moment.new_tokens + moment.cached_tokens
    return moment.cached_tokens / total if total else 0.0


def overall_hit_rate(prefills: Load) -> float:
    """Share of prompt tokens that the cache supplied."""
    cached = sum(moment.cached_tokens for moment in prefills.moments)
    total = cached + sum(moment.new_tokens for moment in prefills.moments)
    return cached / total if total else 0.0


def _default_policy(case: Case) -> str:
    """Servers of 2024 sorted by longest prefix match unless told otherwise."""
    old = any("2024" in source.generation for source in case.seen.sources)
    return "lpm" if old else "fcfs"


CHECK = Check(
    cause="prefix-miss",
    title="Shared prefixes are computed again",
    find=find,
    meaning="Keys and values of earlier prompts stay in a prefix cache while memory allows. "
    "Requests with the same beginning (a document, a conversation, few-shot examples) need only "
    "compute their rest, if they come while it is still there. In order of arrival, requests of "
    "different groups alternate, and each group evicts the prefix of the next.",
    rule="Under a queue, at least 15 % of the prefill batches find 40 % or more of their prompt "
    "tokens in the cache and at least half find at most 10 %; overall it is at most 40 %; and the "
    "policy takes requests in order of arrival.",
    counter_evidence="Prompts that share nothing find nothing in every batch. One system prompt "
    "for all gives every batch the same share. In conversations the first turns find nothing, but "
    "most requests are later turns. None of these gains by another order, and without a queue "
    "there is no order to choose.",
    guide="SGLang's tuning guides of all years: if the workload has many shared prefixes, use "
    "--schedule-policy lpm (longest prefix match; the default in 2024, fcfs is today's). It sorts "
    "requests for more cache hits and costs scheduling time.",
    equation="tokens to compute = 1 - hit rate; if all batches had the rate of the better ones: "
    "(1 - better) / (1 - today's) of today's work",
    picture="""\
arrival   A1 B1 C1 A2 B2 C2   each finds its prefix evicted
lpm       A1 A2 B1 B2 C1 C2   every second one finds it cached""",
)
