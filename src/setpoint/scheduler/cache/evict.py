"""The order in which cached stretches are evicted: one policy object per name, and a lazy heap over
the unlocked leaves.

Works on the fields of a node. It knows neither the tree, nor the pages, nor who asks for memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from setpoint.scheduler.cache.node import EvictionKey, Rank, TreeNode


class Lru:
    """Least recently used first; the base of the other policies. A rank is what a node keeps for
    its policy: here, the tick of its last use. Contract: the node with the smallest key goes first;
    use never decreases a key, only a split may (``EvictionQueue.push``). A key ends with the last
    use, which no two leaves share, so keys never tie and the order is deterministic.
    """

    def fresh(self, tick: int) -> Rank:
        """The rank of a new stretch."""
        return tick

    def use(self, rank: Rank, tick: int) -> Rank:
        """The rank after the stretch was matched, touched, or lay on a path that was extended."""
        return tick

    def hit(self, rank: Rank, priority: int) -> Rank:
        """The rank after a request of this priority was admitted with the stretch as part of its
        prefix."""
        return rank

    def grow(self, rank: Rank, priority: int, end: int) -> Rank:
        """The rank after a request of this priority cached tokens up to position ``end`` through
        the stretch, or created it."""
        return rank

    def last_use(self, rank: Rank) -> int:
        tick: int = rank
        return tick

    def key(self, node: TreeNode) -> EvictionKey:
        return node.rank


class Scored(Lru):
    """Lowest score first, then least recently used. A rank is (score, tick of the last use)."""

    fresh_score = 0

    def fresh(self, tick: int) -> Rank:
        return self.fresh_score, tick

    def use(self, rank: Rank, tick: int) -> Rank:
        return rank[0], tick

    def last_use(self, rank: Rank) -> int:
        tick: int = rank[1]
        return tick


class Lfu(Scored):
    """Least frequently used first. Score: number of hits."""

    def hit(self, rank: Rank, priority: int) -> Rank:
        return rank[0] + 1, rank[1]


class Slru(Lfu):
    """Stretches with fewer than ``protected_threshold`` hits first, so that a flood of prompts that
    are sent only once does not evict what is in use."""

    def __init__(self, *, protected_threshold: int = 2) -> None:
        self._threshold = protected_threshold

    def key(self, node: TreeNode) -> EvictionKey:
        return int(node.rank[0] >= self._threshold), node.rank[1]


class Priority(Scored):
    """Lowest priority first. Score: the highest priority among the requests that cached or hit the
    stretch."""

    fresh_score = -(1 << 64)
    """Not above any priority (``core.settings.LEAST_URGENT``): a new stretch takes the priority of
    its request."""

    def hit(self, rank: Rank, priority: int) -> Rank:
        return max(rank[0], priority), rank[1]

    def grow(self, rank: Rank, priority: int, end: int) -> Rank:
        return max(rank[0], priority), rank[1]


class Tlru(Scored):
    """Tail-optimised LRU: first evicts what the next prefill can recompute within its budget (arXiv
    2510.15152, decision 0006).

    If a conversation has L tokens and its next prompt adds ``next_prompt_estimate``, only the first
    max(0, L + next_prompt_estimate - threshold) must stay cached for a prefill of at most
    ``threshold`` tokens. Score: L, the longest sequence that was cached through the stretch.
    """

    def __init__(self, *, threshold: int, next_prompt_estimate: int) -> None:
        self._spare = threshold - next_prompt_estimate

    def grow(self, rank: Rank, priority: int, end: int) -> Rank:
        return max(rank[0], end), rank[1]

    def key(self, node: TreeNode) -> EvictionKey:
        length, tick = node.rank
        return int(node.start < max(0, length - self._spare)), tick


POLICIES: dict[str, Callable[..., Lru]] = {
    "lru": Lru,
    "lfu": Lfu,
    "slru": Slru,
    "priority": Priority,
    "tlru": Tlru,
}


def eviction_policy(name: str, **parameters: Any) -> Lru:
    """The named policy. Raises ValueError for an unknown one; parameters are checked where the user
    gave them."""
    if name not in POLICIES:
        raise ValueError(f"Unknown eviction policy {name!r}; known: {', '.join(POLICIES)}.")
    return POLICIES[name](**parameters)


class EvictionQueue:
    """The unlocked leaves, with the one to evict first on top.

    Contract: at most one valid entry per node, the one whose key is ``node.queued``. The entry of a
    node that is locked, gets children or is touched stays; ``pop`` drops or renews such entries
    when they reach the top, so each costs O(log n) once. If a key has fallen, the node gets a new
    entry and the old one is void; the heap is rebuilt when more than half of it is void, so it is
    never larger than twice the tree.
    """

    __slots__ = ("_heap", "_key", "_num_void")

    def __init__(self, policy: Lru) -> None:
        self._key = policy.key
        self._heap: list[tuple[EvictionKey, TreeNode]] = []
        self._num_void = 0

    def push(self, node: TreeNode) -> None:
        """Add a node that has become an unlocked leaf, or an unlocked leaf whose key may have
        fallen."""
        assert node.is_evictable
        key = self._key(node)
        if node.queued is not None:
            if node.queued <= key:
                return
            self._num_void += 1
        node.queued = key
        heapq.heappush(self._heap, (key, node))
        if 2 * self._num_void > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[1].queued == entry[0]]
            heapq.heapify(self._heap)
            self._num_void = 0

    def first(self, count: int) -> list[TreeNode]:
        """About the first ``count`` unlocked leaves, in the order of their present keys."""
        entries = heapq.nsmallest(2 * count, self._heap, key=lambda entry: entry[0])
        nodes = [node for key, node in entries if key == node.queued and node.is_evictable]
        return sorted(nodes, key=self._key)[:count]

    def pop(self) -> TreeNode | None:
        """Remove and return the unlocked leaf to evict first; None if there is none."""
        heap = self._heap
        while heap:
            key, node = heap[0]
            if key != node.queued:
                heapq.heappop(heap)
                self._num_void -= 1
                continue
            current = self._key(node)
            if node.is_evictable and key != current:
                node.queued = current
                heapq.heapreplace(heap, (current, node))
                continue
            heapq.heappop(heap)
            node.queued = None
            if node.is_evictable:
                return node
        return None
