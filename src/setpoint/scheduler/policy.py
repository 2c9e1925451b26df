"""Waiting-queue policies (docs/sglang/scheduling.md#queue-orders): pure functions from a frozen
view of the queue to an order.

A policy neither admits nor skips: the scan that follows stops at the first request that does not
fit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from setpoint.core.request import Ids

QUEUE_LIMIT = 128
"""With more waiting requests than this, lpm and hrrn act as fcfs: matching each request at every
step would cost more than it saves."""

NO_IDS = np.zeros(0, np.int32)


class Candidate(NamedTuple):
    """One waiting request as a policy sees it. ``ids`` to ``path`` are filled only for policies
    that read the cache.

    It is a tuple because a pass makes thousands of them, and a frozen dataclass of this size takes
    more than twice as long to make.
    """

    seq_id: int
    ids: Ids = NO_IDS
    namespace: str = ""
    num_matched: int = 0
    """Number of tokens of ``ids`` that are cached now."""
    path: tuple[int, ...] = ()
    """The cached stretches that the match runs through, from the root down; equal numbers are the
    same stretch (dfs-weight)."""

    urgency: int = 0
    """Larger is more urgent; all equal without priority scheduling."""
    max_new_tokens: int = 0
    routing_key: str = ""
    arrived_at: int = 0
    """``QueueView.num_processed`` when the request joined the queue."""


@dataclass(slots=True, frozen=True)
class QueueView:
    candidates: Sequence[Candidate]
    """The waiting requests, in queue order."""
    in_batch_check: int = -1
    in_batch_deprioritize: int = 0
    num_processed: int = 0
    """Prompt tokens computed since the start: the clock that hrrn ages by."""
    running_keys: Mapping[str, int] = field(default_factory=dict)
    """Routing key -> number of running requests that have it."""
    seed: tuple[int, ...] = (0,)
    """Seed of the random policy, different in every pass."""


def fcfs(view: QueueView) -> list[int]:
    """Most urgent first, in queue order among equals. Without priority scheduling all are equal."""
    return _sorted(view, lambda c: -c.urgency)


def lpm(view: QueueView) -> list[int]:
    """Longest matched prefix first. Of requests that share a prefix which is not cached yet, all
    but the first go last."""
    last = _duplicates(view)
    return _sorted(view, lambda c: (c.seq_id in last, -c.num_matched))


def dfs_weight(view: QueueView) -> list[int]:
    """Depth first through the cached tree: the subtree that most waiting requests match comes
    first, and requests below a node come before those that end at it.

    A sort by paths of (weight, first arrival) pairs gives this order if each path ends with a pair
    that is larger than any node's.
    """
    weight: Counter[int] = Counter(node for candidate in view.candidates for node in candidate.path)
    first: dict[int, int] = {}
    for position, candidate in enumerate(view.candidates):
        for node in candidate.path:
            first.setdefault(node, position)
    return _sorted(
        view, lambda c: [*((-weight[node], first[node]) for node in c.path), (1, -c.num_matched)]
    )


def hrrn(view: QueueView) -> list[int]:
    """Highest response ratio next. The ratio is the number of prompt tokens computed since the
    request's arrival, divided by its uncached tokens. Requests whose prompt is cached as a whole
    come first. No request starves."""
    last = _duplicates(view)

    def key(candidate: Candidate) -> tuple[bool, float]:
        uncached = len(candidate.ids) - candidate.num_matched
        ratio = (view.num_processed - candidate.arrived_at) / uncached if uncached else math.inf
        return candidate.seq_id in last, -ratio

    return _sorted(view, key)


def shortest_prefill_first(view: QueueView) -> list[int]:
    """Fewest uncached tokens first. A long prompt may starve under a stream of short ones."""
    last = _duplicates(view)
    return _sorted(view, lambda c: (c.seq_id in last, max(1, len(c.ids) - c.num_matched)))


def lof(view: QueueView) -> list[int]:
    """Most urgent first; among equals, the largest number of tokens that a request may generate."""
    return _sorted(view, lambda c: (-c.urgency, -c.max_new_tokens))


def random(view: QueueView) -> list[int]:
    """A random order, a new one in every pass."""
    order = np.random.default_rng(view.seed).permutation(len(view.candidates))
    return [view.candidates[index].seq_id for index in order.tolist()]


def routing_key(view: QueueView) -> list[int]:
    """Requests whose routing key most running requests share come first; those whose key no running
    request has come last, grouped by key. Groups with equal counts are ordered by their first
    member in the queue, not by the spelling of the key."""
    if not view.running_keys:
        return [candidate.seq_id for candidate in view.candidates]
    first: dict[str, int] = {}
    for position, candidate in enumerate(view.candidates):
        first.setdefault(candidate.routing_key, position)
    return _sorted(view, lambda c: (-view.running_keys.get(c.routing_key, 0), first[c.routing_key]))


def _sorted(view: QueueView, key: Callable[[Candidate], object]) -> list[int]:
    """The seq_ids sorted by ``key``; ties keep queue order."""
    return [candidate.seq_id for candidate in sorted(view.candidates, key=key)]  # type: ignore[arg-type]


def _duplicates(view: QueueView) -> set[int]:
    """The seq_ids of requests with little in the cache that begin like an earlier such request. If
    they go later, they find the prefix cached, because pages can be matched as soon as they are
    scheduled.
    """
    num_shared = max(view.in_batch_deprioritize, 0)
    seen: set[tuple[str, bytes]] = set()
    found: set[int] = set()
    for candidate in view.candidates:
        if candidate.num_matched > view.in_batch_check or len(candidate.ids) < num_shared:
            continue
        beginning = candidate.namespace, candidate.ids[:num_shared].tobytes()
        if beginning in seen:
            found.add(candidate.seq_id)
        seen.add(beginning)
    return found


@dataclass(slots=True, frozen=True)
class Policy:
    order: Callable[[QueueView], list[int]]
    reads_cache: bool = False
    """Whether every waiting request must be matched for the policy; without a prefix cache it acts
    as fcfs."""
    reads_paths: bool = False
    queue_limit: int | None = None
    """Queue length above which the policy acts as fcfs."""
    shares_chunks: bool = False
    """Whether waiting prompts that are shorter than the rest of the prompt in mid-prefill may be
    computed whole in the same step as its next chunk."""


POLICIES: dict[str, Policy] = {
    "fcfs": Policy(fcfs),
    "lpm": Policy(lpm, reads_cache=True, queue_limit=QUEUE_LIMIT),
    "dfs-weight": Policy(dfs_weight, reads_cache=True, reads_paths=True),
    "hrrn": Policy(hrrn, reads_cache=True, queue_limit=QUEUE_LIMIT),
    "shortest-prefill-first": Policy(shortest_prefill_first, reads_cache=True, shares_chunks=True),
    "lof": Policy(lof),
    "random": Policy(random),
    "routing-key": Policy(routing_key),
}
