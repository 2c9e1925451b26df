"""pool-leak: pages of the KV pool are lost."""

from __future__ import annotations

import statistics

from setpoint.core.moments import Moment
from setpoint.doctor.case import Case
from setpoint.doctor.checks.check import Check
from setpoint.doctor.checks.common import counted, events, percent
from setpoint.doctor.checks.prompts import is_cut
from setpoint.doctor.findings import Action, Finding, RuledOut
from setpoint.doctor.observations import Evidence, Rank

SURE = 1.05
"""More tokens for each running request are impossible, as a multiple of the longest context."""
MIN_MOMENTS = 5
MIN_LOST = 0.15
MIN_GROWTH = 0.1
"""Shares of the pool that are in use while nothing runs, and by which they have grown."""
MANY_MORE = 2.0
"""Factor of running requests: if so many times as many held no more tokens at another moment, the
tokens of this moment are not theirs."""


def find(case: Case) -> Finding | None:
    leaks = events(case, "leak")
    if leaks:
        evidence = tuple(Evidence(event.line, event.text) for event in leaks[:3])
        count = sum(rank.num_events.get("leak", 0) for rank in case.ranks)
        return _finding(
            case,
            0.97,
            "Pages of the KV pool are lost: the server's own check found pages that no request and "
            f"no cached prefix owns ({counted(count, 'message')}).",
            evidence,
        )
    return _held_by_nobody(case) or _held_by_too_few(case)


def _held_by_nobody(case: Case) -> Finding | None:
    """Nothing runs when a request begins, but more and more of the pool is in use."""
    for rank in case.ranks:
        empty = _begun_alone(case, rank)
        if len(empty) < MIN_MOMENTS:
            continue
        held = [_held(case, moment) for moment in empty]
        third = max(len(held) // 3, 1)
        first, last = statistics.median(held[:third]), min(held[-third:])
        if last < MIN_LOST or last - first < MIN_GROWTH:
            continue
        at = held.index(last, len(held) - third)
        return _finding(
            case,
            0.85,
            "Pages of the KV pool are lost: when a request begins and no other runs, up to "
            f"{percent(held[at])} of the pool is in use already, at first "
            f"{percent(first)}.",
            tuple(Evidence(moment.line, moment.text) for moment in (empty[0], empty[at])),
        )
    return None


def _begun_alone(case: Case, rank: Rank) -> list[Moment]:
    """Prefill lines before which nothing ran, with no part of a prompt from the line before."""
    found = []
    before: Moment | None = None
    for moment in rank.moments:
        goes_on = before is not None and before.num_prefill and is_cut(before, case)
        is_empty = moment.running_max == 0 and not moment.num_decode and moment.num_prefill
        in_transfer = any("inflight" in name and count for name, count in moment.other.items())
        if is_empty and not goes_on and not in_transfer and moment.usage is not None:
            found.append(moment)
        before = moment
    return found


def _held(case: Case, moment: Moment) -> float:
    """Share of the pool that is in use, without the prompts that this batch reads or finds."""
    pool = case.facts.max_total_num_tokens
    own = (moment.new_tokens + moment.cached_tokens) / pool if pool else 0.0
    return max((moment.usage or 0.0) - own, 0.0)


def _held_by_too_few(case: Case) -> Finding | None:
    lost = _impossible(case)
    if len(lost) < MIN_MOMENTS:
        return None
    last = lost[-1]
    return _finding(
        case,
        0.8,
        f"Pages of the KV pool are lost: {counted(round(last.running or 0), 'running request')} "
        f"cannot use {last.tokens:,.0f} tokens with contexts of at most "
        f"{case.facts.context_len:,} tokens.",
        tuple(Evidence(moment.line, moment.text) for moment in (lost[0], last)),
    )


def _impossible(case: Case) -> list[Moment]:
    """Moments at which the running requests hold more tokens than their contexts allow, although
    at another moment many more requests needed no more: usage does not follow them."""
    context = case.facts.context_len
    if not context:
        return []
    decodes = [
        (moment, max(moment.running_max, 1.0), moment.tokens)
        for rank in case.ranks
        for moment in rank.moments
        if moment.num_decode and not moment.num_prefill
        if moment.running_max is not None and moment.tokens is not None
    ]
    return [
        moment
        for moment, running, tokens in decodes
        if tokens > SURE * context * running
        and any(more >= MANY_MORE * running and held <= SURE * tokens for _, more, held in decodes)
    ]


def _finding(case: Case, sure: float, summary: str, evidence: tuple[Evidence, ...]) -> Finding:
    radix = case.option("disable_radix_cache") is not True
    return Finding(
        cause="pool-leak",
        confidence=sure,
        summary=summary,
        evidence=evidence,
        action=Action(
            "Restart the server, and update it to a version that fixes the leak. It is a bug of "
            "the server, and no option fixes it."
            + (
                " Until then, --disable-radix-cache avoids many of these errors, but shared "
                "prefixes are then computed again."
                if radix
                else ""
            )
        ),
        ruled_out=(
            RuledOut(
                "kv-full", "No request uses the lost pages; a larger KV pool would lose pages, too."
            ),
        ),
        verify="When no request runs, KV pool usage (token usage) goes back to 0.00.",
        falsify="KV pool usage (token usage) falls to 0.00 whenever the server is idle, and the "
        "message does not come back.",
        share=1.0,
    )


CHECK = Check(
    cause="pool-leak",
    title="Pages of the KV pool are lost",
    find=find,
    meaning="Every page of the KV pool is free, in use by a request, or kept for a cached prefix "
    "that can be evicted. If the three do not add up to the whole pool, pages are lost: usage "
    "rises slowly until no request can be admitted, or until the server's own check ends it.",
    rule="A message says that the memory pool leaks or that its accounting is wrong; or at least "
    f"{MIN_MOMENTS} decode lines show more tokens in use than the contexts of the running requests "
    "can hold, while at other times twice as many requests used no more; or at least "
    f"{MIN_MOMENTS} prefill batches begin while nothing runs, and the share of the pool that is in "
    f"use before them grows by {percent(MIN_GROWTH)} or more, to {percent(MIN_LOST)} or more.",
    counter_evidence="A full KV pool with many running requests is not a leak. Cached prefixes "
    "that can be evicted do not count as in use.",
    advice="Restart and update the server: it is a bug. --disable-radix-cache avoids many of "
    "these errors.",
    guide="The guides do not cover it. It is reported in sglang#140, #6778 (usage rises to 0.96 "
    "and nothing runs any more), #6888, #11970, #20010.",
    equation="lost = total - (available + evictable + protected)",
    picture="""\
KV pool in use     20 % .. 40 % .. 60 % .. 80 % .. 96 %
running requests   30      28      31      12      0
                   (usage should fall with the requests)""",
)
