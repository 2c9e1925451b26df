"""Waiting-queue policies (FACTS §2.3): pure functions from a frozen view of the queue to an order.

A policy neither admits nor skips: the scan that follows stops at the first request that does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from setpoint.core.request import Ids

LPM_QUEUE_LIMIT = 128
"""Above this many waiting requests lpm acts as fcfs: matching each of them every step would cost more than it saves."""


@dataclass(slots=True, frozen=True)
class Candidate:
    """One waiting request as a policy sees it."""

    seq_id: int
    ids: Ids
    namespace: str
    num_matched: int
    """Tokens of ``ids`` in the cache now."""


@dataclass(slots=True, frozen=True)
class QueueView:
    candidates: Sequence[Candidate]
    """In queue order."""
    in_batch_check: int
    in_batch_deprioritize: int


def lpm(view: QueueView) -> list[int]:
    """Longest matched prefix first; of requests that share a prefix not cached yet, one goes first and the rest last.

    The rest then find the prefix in the tree, because pages are matchable as soon as they are scheduled. To share n tokens is to
    begin with the same n, so that a set of beginnings answers it without a tree of prompts.
    """
    num_shared = max(view.in_batch_deprioritize, 0)
    seen: set[tuple[str, bytes]] = set()
    last: set[int] = set()
    for candidate in view.candidates:
        if candidate.num_matched > view.in_batch_check or len(candidate.ids) < num_shared:
            continue
        beginning = candidate.namespace, candidate.ids[:num_shared].tobytes()
        if beginning in seen:
            last.add(candidate.seq_id)
        seen.add(beginning)
    ranked = sorted(view.candidates, key=lambda c: (c.seq_id in last, -c.num_matched))
    return [candidate.seq_id for candidate in ranked]


@dataclass(slots=True, frozen=True)
class Policy:
    """``order`` None = queue order as it is, no view needed."""

    order: Callable[[QueueView], list[int]] | None
    queue_limit: int | None = None
    """Queue length above which the policy acts as fcfs."""


POLICIES: dict[str, Policy] = {
    "fcfs": Policy(order=None),
    "lpm": Policy(order=lpm, queue_limit=LPM_QUEUE_LIMIT),
}
