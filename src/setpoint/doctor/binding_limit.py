"""Determines which limit binds at one moment. The checks do this for every moment of a source, the
doctor inside a server for the last one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from setpoint.core.moments import Moment
from setpoint.doctor.phases import running_of, waits
from setpoint.observe.contention import LEAST_SHARE

Limit = Literal[
    "idle",
    "client-bound",
    "seq-cap",
    "kv-full",
    "kv-conservative",
    "prefill-budget",
    "grammar-queue",
    "other-pool-full",
    "admission-delayed",
    "cpu-contended",
    "unknown",
]
"""What keeps more requests from running. kv-full: memory is in use, which is right if the queue is
moderate. client-bound: nothing waits. cpu-contended: other programs take the CPU, and none of the
scheduler's own limits binds. unknown: the moment shows too little."""

FULL = 0.9
"""Usage from which the guides call the memory well used."""
WHOLE = 1.5
"""Memory of a request at its end, for which there must be room before it begins, as a multiple of
what a running one has in the mean: 1 if prompts are long, 2 if answers are."""
OTHER_FULL = 0.95
AT_CAP = 0.95
AT_BUDGET = 0.9
MIN_BUSY_S = 0.1
"""The shortest busy time of a moment for which the engine's share of the CPU means anything."""
BY_CONTENTION: tuple[Limit, ...] = ("client-bound", "prefill-budget")
"""What a moment looks like in which other programs take the CPU: nothing waits, or prompts wait for
steps that take long."""

# The admission's reasons (core.records.AdmissionRefusal); "blocked" only repeats the reason of the
# first.
REASONS: dict[str, Limit] = {
    "no_slot": "seq-cap",
    "no_memory": "kv-conservative",
    "token_budget": "prefill-budget",
    "chunk_budget": "prefill-budget",
    "prefill_limit": "prefill-budget",
    "delayed": "admission-delayed",
    "decode_turn": "admission-delayed",
}


@dataclass(slots=True, frozen=True)
class SchedulerLimits:
    """The limits of a scheduler. None: unknown."""

    slots: float | None = None
    """Most requests that may run."""
    prefill_tokens: float | None = None
    """Most prompt tokens of one prefill batch."""
    whole_prompts: bool = False
    """Whether prompts are never cut to fill a batch, so that it is full if the next prompt does not
    fit."""
    reasons: bool = False
    """Whether the source says why requests were refused (``Moment.refusals``)."""
    prefill_bound: bool = False
    """Whether prefill batches are at their budget most of the time, so that a queue between two of
    them waits for it, too."""


def at_cap(moment: Moment, limits: SchedulerLimits) -> bool:
    running = running_of(moment)
    if running is None or not limits.slots:
        return False
    most = max(running, moment.running_max or 0.0)
    return most >= AT_CAP * limits.slots or most >= limits.slots - 1 > 1


def at_budget(moment: Moment, limits: SchedulerLimits) -> bool:
    """Whether the moment's prefill batches used their budget of tokens."""
    if not limits.prefill_tokens or not moment.num_prefill:
        return False
    tokens = moment.new_tokens / moment.num_prefill
    if limits.whole_prompts and moment.new_seqs:
        tokens += moment.new_tokens / moment.new_seqs
    return tokens >= AT_BUDGET * limits.prefill_tokens


def is_full(moment: Moment) -> bool:
    """Whether the KV pool is in good use, or a request more would not fit."""
    usage = moment.usage or 0.0
    return usage >= FULL or usage + WHOLE * usage / max(moment.running or 1e9, 1) >= 1


def other_pool(moment: Moment) -> str | None:
    """The name of a second pool that is full while the main one is not."""
    full = [name for name, usage in moment.other_usage.items() if usage >= OTHER_FULL]
    return full[0] if full and (moment.usage or 0.0) < FULL else None


def is_disturbed(moment: Moment) -> bool:
    """Whether other programs took the CPU while the engine had work."""
    busy_s = moment.busy_s or 0.0
    return moment.cpu_s is not None and busy_s >= MIN_BUSY_S and moment.cpu_s < LEAST_SHARE * busy_s


def binding_limit(moment: Moment, limits: SchedulerLimits) -> Limit:
    """The limit that keeps more requests from running. Reasons that the scheduler itself gives for
    its refusals count for more than figures."""
    limit = _of_scheduler(moment, limits)
    return "cpu-contended" if limit in BY_CONTENTION and is_disturbed(moment) else limit


def _of_scheduler(moment: Moment, limits: SchedulerLimits) -> Limit:
    if not waits(moment) and not (moment.queue is None and moment.refusals):
        return _without_queue(moment)
    reason = _reason(moment)
    if reason is None and limits.reasons:
        return "unknown"  # nobody was refused: the queue waits for the step that runs
    if reason == "kv-conservative" or reason is None:
        if other_pool(moment):
            return "other-pool-full"
        if reason is None and at_cap(moment, limits):
            return "seq-cap"
        if reason is None and at_budget(moment, limits):
            return "prefill-budget"  # memory took this batch, whatever the usage is
        if is_full(moment):
            return "kv-full"
        if reason is None and limits.prefill_bound:
            return "prefill-budget"
        return "unknown" if moment.usage is None and reason is None else "kv-conservative"
    return reason


def _reason(moment: Moment) -> Limit | None:
    """The most frequent reason for refusals in the moment, as a limit."""
    counts: dict[Limit, int] = {}
    for name, count in moment.refusals.items():
        if name in REASONS:
            counts[REASONS[name]] = counts.get(REASONS[name], 0) + count
    return max(counts.items(), key=lambda item: item[1])[0] if counts else None


def _without_queue(moment: Moment) -> Limit:
    if moment.preparing and moment.preparing >= 1:
        return "grammar-queue"
    if not moment.running and not moment.num_prefill and not moment.num_decode:
        return "idle"
    return "unknown" if moment.queue is None else "client-bound"
