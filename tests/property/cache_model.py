"""The KV cache as a dict, and what its tree must look like: the model of test_radix_property.

It knows for every cached prefix its page and how many handles hold it, and what the eviction policies
go by; who is evicted in which order is searched for among all stretches.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from setpoint.scheduler.cache.handle import PrefixHandle
from setpoint.scheduler.cache.manager import KVCache

Prefix = tuple[str, tuple[int, ...]]
"""Namespace and all tokens up to the end of a page: what the KV in that page depends on."""


@dataclass
class Seq:
    """A caller as the scheduler is one: a page table, of which the cache owns a part."""

    namespace: str
    ids: list[int]
    handle: PrefixHandle
    table: list[int]
    private: list[int] = field(default_factory=list)  # what extend returned
    priority: int = 0


@dataclass
class Facts:
    """What the model remembers of a prefix while it is cached, beside its page."""

    hits: int = 0
    priority: int = -100
    longest: int = 0


TLRU = {"threshold": 7, "next_prompt_estimate": 2}


@dataclass(frozen=True)
class Edge:
    """A stretch of the real tree: its first and last prefix, and where it is. What it is worth is
    the model's to say."""

    path: tuple[int, ...]
    """Tokens above it."""
    prefixes: tuple[Prefix, ...]


class CacheModel:
    def __init__(
        self,
        rng: random.Random,
        page_size: int,
        vocabulary: int,
        enabled: bool = True,
        policy: str = "lru",
    ) -> None:
        self.rng, self.page_size, self.vocabulary, self.enabled, self.policy = (
            rng,
            page_size,
            vocabulary,
            enabled,
            policy,
        )
        self.num_pages = rng.choice((1, 3, 8, 20, 20, 32))
        self.cache = KVCache(
            num_pages=self.num_pages,
            page_size=page_size,
            enabled=enabled,
            eviction_policy=policy,
            eviction_parameters=TLRU if policy == "tlru" else {},
        )
        self.facts: dict[Prefix, Facts] = {}
        self.cached: dict[Prefix, int] = {}
        self.used: dict[Prefix, int] = {}
        self.store: list[Prefix | None] = [None] * (self.num_pages + 1)
        self.held: set[int] = set()
        self.seqs: list[Seq] = []
        self.scratch: list[np.ndarray] = []
        self.tick = 0
        self.counts: Counter[str] = Counter()

    # --- the model ---

    def prefixes(self, namespace: str, ids: list[int]) -> list[Prefix]:
        """One per whole page."""
        return [
            (namespace, tuple(ids[: end + self.page_size]))
            for end in range(0, len(ids) - self.page_size + 1, self.page_size)
        ]

    def longest(self, namespace: str, ids: list[int]) -> list[Prefix]:
        path = []
        for prefix in self.prefixes(namespace, ids):
            if prefix not in self.cached:
                break
            path.append(prefix)
        return path

    def settled(self, seq: Seq) -> list[Prefix]:
        return (
            self.prefixes(seq.namespace, seq.ids[: seq.handle.num_tokens]) if self.enabled else []
        )

    def cover(self) -> Counter[Prefix]:
        """How many handles hold each prefix."""
        return Counter(prefix for seq in self.seqs for prefix in self.settled(seq))

    def use(self, path: list[Prefix]) -> None:
        self.tick += 1
        self.used.update(dict.fromkeys(path, self.tick))

    def edges(self) -> dict[Edge, list[Edge]]:
        """How the real tree is cut into stretches, each with those below it. Its scores and keys
        are not looked at."""
        below: dict[Edge, list[Edge]] = {}
        todo = [
            (child, label[0], (), None) for label, child in self.cache._tree.root.children.items()
        ]
        while todo:
            node, namespace, path, above = todo.pop()
            tokens = (*path, *np.frombuffer(node.key, np.int32).tolist())
            ends = range(len(path) + self.page_size, len(tokens) + 1, self.page_size)
            edge = Edge(path, tuple((namespace, tokens[:end]) for end in ends))
            below[edge] = []
            if above is not None:
                below[above].append(edge)
            todo += [(child, namespace, tokens, edge) for child in node.children.values()]
        return below

    def expected_evictions(self, num_pages: int) -> set[Prefix]:
        """The evictions by brute force: among all unlocked leaves the one with the least key goes,
        until ``num_pages`` are had."""
        below, cover = self.edges(), self.cover()
        gone: set[Prefix] = set()
        while len(gone) < num_pages:
            leaves = [
                edge
                for edge, children in below.items()
                if not children and not cover[edge.prefixes[-1]]
            ]
            victim = min(leaves, key=self.eviction_key)
            gone.update(victim.prefixes)
            del below[victim]
            for children in below.values():
                if victim in children:
                    children.remove(victim)
        return gone

    def eviction_key(self, edge: Edge) -> tuple[int, int]:
        """The policies again, in one place and without their mechanics. A stretch's prefixes share
        all facts."""
        facts = self.facts[edge.prefixes[-1]]
        needed = max(0, facts.longest + TLRU["next_prompt_estimate"] - TLRU["threshold"])
        first = {
            "lfu": facts.hits,
            "slru": int(facts.hits >= 2),
            "priority": facts.priority,
            "tlru": int(len(edge.path) < needed),
        }
        return first.get(self.policy, 0), self.used[edge.prefixes[-1]]

    def tree(self) -> dict[Prefix, tuple[int, int]]:
        """What the real tree holds: prefix -> (page, lock count)."""
        root = self.cache._tree.root
        found, todo = {}, [(child, label[0], ()) for label, child in root.children.items()]
        while todo:
            node, namespace, tokens = todo.pop()
            key, pages = (
                np.frombuffer(node.key, np.int32).tolist(),
                np.frombuffer(node.pages, np.int32).tolist(),
            )
            for index, page in enumerate(pages):
                found[namespace, (*tokens, *key[: (index + 1) * self.page_size])] = (
                    page,
                    node.lock_ref,
                )
            todo += [(child, namespace, (*tokens, *key)) for child in node.children.values()]
        return found

    # --- the steps ---
