"""cache-tier: the prefix cache beyond the KV pool is off, or costs more than it saves."""

from __future__ import annotations

from setpoint.core.control import TierState
from setpoint.doctor.case import Case
from setpoint.doctor.checks.check import Check
from setpoint.doctor.checks.common import counted, events, percent
from setpoint.doctor.findings import Action, Finding
from setpoint.doctor.observations import Evidence

MIN_AGE_S = 60.0
"""A tier that is younger has had no time to pay."""
MIN_SHARE = 0.02
"""Share of the time that a tier may cost without a word."""
WORTH = 2.0
"""A tier whose loads are so many times faster than computing is worth a sentence."""


def find(case: Case) -> Finding | None:
    for tiers in case.seen.tiers:
        if not tiers.has_tier:
            continue
        if tiers.off:
            return _off(tiers.off, _balance(tiers))
        if _costs(tiers) and case.option("disaggregation_mode") != "decode":
            return _costly(tiers)
    told = [] if case.seen.tiers else events(case, "tier-off")
    if told:  # a log
        name, _, why = told[-1].text.partition("Cache tier ")[2].partition(" is off: ")
        return _off(f"{name}: {why}", tuple(Evidence(each.line, each.text) for each in told[-3:]))
    return None


def praise(tiers: TierState) -> str:
    """What to say about a tier that pays; empty if it does not, or has had nothing to do."""
    if (
        not tiers.has_tier
        or tiers.off
        or _costs(tiers)
        or not tiers.loaded_tokens
        or not tiers.load_s
    ):
        return ""
    times = tiers.earned_s / tiers.load_s
    if times < WORTH:
        return ""
    return (
        f"The cache tier{_named(tiers)} loads prefixes {times:,.0f} times faster than they are"
        f" computed: {tiers.loaded_tokens:,} tokens in {tiers.load_s:.1f} s instead of"
        f" {tiers.earned_s:.1f} s. Keep it."
    )


def _loss_s(tiers: TierState) -> float:
    return tiers.load_s + tiers.save_s - tiers.earned_s


def _costs(tiers: TierState) -> bool:
    return tiers.age_s >= MIN_AGE_S and _loss_s(tiers) > MIN_SHARE * tiers.age_s


def _named(tiers: TierState) -> str:
    return f" ({tiers.backend})" if tiers.backend else ""


def _balance(tiers: TierState) -> tuple[Evidence, ...]:
    lost = sum(tiers.lost_blocks.values())
    words = [
        f"In {tiers.age_s:,.0f} s, loading took {tiers.load_s:.1f} s and saving {tiers.save_s:.1f}"
        f" s; computing what was loaded would have taken {tiers.earned_s:.1f} s.",
        f"{tiers.loaded_tokens:,} tokens were loaded and {tiers.saved_tokens:,} were saved.",
    ]
    if lost:
        words.append(f"{counted(lost, 'block')} were damaged, evicted or refused.")
    return tuple(Evidence(0, each) for each in words)


def _why_off(off: str) -> str:
    """off: as the server tells it, with the tier's name in front if it is one tier's."""
    name, _, why = off.rstrip(".").partition(": ")
    if why and name in ("host", "storage"):
        return f"The tier '{name}' is off: {why}."
    return f"The cache tier is off: {off.rstrip('.')}."


def _off(why: str, evidence: tuple[Evidence, ...]) -> Finding:
    return Finding(
        cause="cache-tier",
        confidence=0.95,
        summary=_why_off(why),
        evidence=evidence,
        action=Action(
            "Mend what this names, then restart the server, or use another storage while it runs"
            " (DELETE and PUT /hicache/storage-backend). Without a storage, leave out"
            " --hicache-storage-backend."
        ),
        verify="setpoint:cache_tier_off is 0, and sglang:prefetched_tokens_total grows.",
        falsify="GET /hicache/storage-backend shows no reason in off.",
    )


def _costly(tiers: TierState) -> Finding:
    share = _loss_s(tiers) / tiers.age_s
    gain = f"saves {tiers.earned_s:.1f} s" if tiers.loaded_tokens else "saves nothing"
    if tiers.saves_selectively:
        action = Action(
            "Nothing, if prefixes will be used again: it saves only blocks that were used twice by"
            " now. Otherwise leave out --enable-hierarchical-cache."
        )
    else:
        action = Action(
            "Set --hicache-write-policy to write_through_selective, which saves only what is used a"
            " second time; if no prefix is used again, leave out --enable-hierarchical-cache.",
            "--hicache-write-policy",
            "set",
            "write_through_selective",
        )
    return Finding(
        cause="cache-tier",
        confidence=0.8 if tiers.saves_selectively else 0.85,
        summary=f"The cache tier{_named(tiers)} costs {percent(share)} of the time of a core and"
        f" {gain}.",
        evidence=_balance(tiers),
        action=action,
        risk="Prefixes that come back after a restart are computed once more.",
        verify='setpoint:cache_tier_seconds_total{part="save"} grows more slowly.',
        falsify="The load of today is not the usual one: later, prefixes come back, and"
        ' setpoint:cache_tier_seconds_total{part="earned"} grows faster than the other parts.',
    )


CHECK = Check(
    cause="cache-tier",
    title="The cache beyond the KV pool is off, or does not pay",
    find=find,
    meaning="With --enable-hierarchical-cache, prefixes are kept in files or in another storage"
    " and loaded instead of computed. Saving always costs time, and loading costs some when one"
    " comes back. If none does, only the costs remain. A storage that fails or hangs is switched"
    " off.",
    rule="The server, or its log, says that a tier is off; or, after a minute, loading and saving"
    " have together taken longer than computing what was loaded, by at least 2 % of the time. Only"
    " Setpoint tells these times.",
    counter_evidence="A decode server saves for prefill servers, where what it earns is measured."
    " Loads of less than a minute are not judged, because what is saved now may be"
    " used later. If loading is at least twice as fast as computing and pays for saving, the report"
    " says so in a note.",
    advice="Mend the storage or choose another one; save only what is used twice, or do without.",
    guide="The guides recommend --enable-hierarchical-cache for long contexts and conversations"
    " and do not say how to see whether it pays.",
    picture="""\
loading  [##          ]  2 s     instead of computing  [##########] 40 s
saving   [###         ]  3 s""",
)
