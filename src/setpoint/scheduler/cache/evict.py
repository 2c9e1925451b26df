"""In which order cached stretches are given up: one key function per policy and a lazy heap over the unlocked leaves.

Works on the fields of a node; does not know the tree, the pages or who asks for memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from setpoint.scheduler.cache.node import Node

EvictionKey = int | tuple[int, ...]

EVICTION_KEYS: dict[str, Callable[[Node], EvictionKey]] = {
    "lru": lambda node: node.last_access,
}
"""Policy name -> key of a node; the smallest key goes first.

Contract: while a node lives its key never decreases (the queue's entries may then be old without changing the order), and it ends in
``last_access``, which no two leaves share (so that keys never tie and the order is deterministic).
"""


class EvictionQueue:
    """The unlocked leaves, cheapest to lose first.

    Contract: at most one entry per node, so the heap is never larger than the tree. A node that is locked, grows children or is
    touched leaves its entry behind; ``pop`` drops or renews such entries when they reach the top, so each costs O(log n) once.
    """

    __slots__ = ("_heap", "_key")

    def __init__(self, policy: str) -> None:
        """Raises ValueError for an unknown policy."""
        if policy not in EVICTION_KEYS:
            raise ValueError(f"Unknown eviction policy {policy!r}; known: {', '.join(EVICTION_KEYS)}.")
        self._key = EVICTION_KEYS[policy]
        self._heap: list[tuple[EvictionKey, Node]] = []

    def push(self, node: Node) -> None:
        """Tell of a node that became an unlocked leaf."""
        assert node.is_evictable
        if not node.queued:
            node.queued = True
            heapq.heappush(self._heap, (self._key(node), node))

    def pop(self) -> Node | None:
        """Remove and return the unlocked leaf to give up first; None if there is none."""
        heap = self._heap
        while heap:
            key, node = heap[0]
            current = self._key(node)
            if node.is_evictable and key != current:
                heapq.heapreplace(heap, (current, node))
                continue
            heapq.heappop(heap)
            node.queued = False
            if node.is_evictable:
                return node
        return None
