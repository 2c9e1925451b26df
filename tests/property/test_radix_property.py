"""The KV cache against a model that is a dict, over more than 100,000 random steps with a tiny
vocabulary.

The model knows for every cached prefix its page and how many handles hold it, and what the eviction
policies go by; who is evicted in which order is searched for among all stretches. A fake KV store
knows for every page the whole prefix (namespace included) it was computed for, as real KV does, so
that a page that is reused under someone's feet shows.
"""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from cache_model import CacheModel, Facts, Prefix, Seq

NAMESPACES = ("", "a", "b")
STEPS_PER_WORLD = 1000


class World(CacheModel):
    """Random steps of callers, each checked against the model."""

    def random_ids(self) -> tuple[str, list[int]]:
        namespace, ids = self.rng.choice(NAMESPACES), []
        if self.cached and self.rng.random() < 0.6:
            namespace, known = self.rng.choice(list(self.cached))
            ids = list(known[: self.rng.randint(0, len(known))])
        elif self.seqs and self.rng.random() < 0.5:
            twin = self.rng.choice(self.seqs)
            return twin.namespace, list(twin.ids)
        return namespace, ids + self.tokens(self.rng.randint(0, 4 * self.page_size))

    def tokens(self, num: int) -> list[int]:
        """Mostly the same token, so that sequences also agree where neither is cached yet."""
        return [
            self.rng.randrange(self.vocabulary) if self.rng.random() < 0.5 else 0
            for _ in range(num)
        ]

    def start(self) -> None:
        if len(self.seqs) == 6:
            return self.finish()
        namespace, ids = self.random_ids()
        path = self.longest(namespace, ids) if self.enabled else []
        array = np.array(ids, np.int32)
        assert self.cache.peek(array, namespace) == len(path) * self.page_size
        handle = self.cache.match(array, namespace)
        assert handle.num_tokens == len(path) * self.page_size
        table = handle.pages().tolist()
        assert table == [self.cached[prefix] for prefix in path]
        self.use(path)
        seq = Seq(namespace, ids, handle, table, priority=self.rng.randint(-2, 2))
        self.seqs.append(seq)
        if self.rng.random() < 0.8:  # else looked only, or came back
            self.cache.count_hit(handle, priority=seq.priority)
            for prefix in path:
                self.facts[prefix].hits += 1
                self.facts[prefix].priority = max(self.facts[prefix].priority, seq.priority)
        return None

    def grow(self) -> None:
        if not self.seqs:
            return self.start()
        seq = self.rng.choice(self.seqs)
        if len(seq.ids) > 8 * self.page_size:
            return self.finish()
        longer = seq.ids + self.tokens(self.rng.randint(0, 2 * self.page_size))
        pages = self.alloc(-(-len(longer) // self.page_size) - len(seq.table))
        if pages is None:
            return self.rng.choice((self.retract, self.finish))()
        seq.ids = longer
        seq.table += pages.tolist()
        # New pages are written, and one that was filled in part is filled further. Cached and
        # returned ones are full.
        for index in range(seq.handle.num_tokens // self.page_size, len(seq.table)):
            self.store[seq.table[index]] = (
                seq.namespace,
                tuple(seq.ids[: (index + 1) * self.page_size]),
            )
        return None

    def alloc(self, num: int) -> np.ndarray | None:
        stats, cover, before = self.cache.pool_stats(), self.cover(), dict(self.cached)
        short = num - stats.free // self.page_size
        expected = (
            self.expected_evictions(short) if short * self.page_size <= stats.evictable else set()
        )
        pages = self.cache.alloc(num)
        now = self.tree()
        removed = [prefix for prefix in before if prefix not in now]
        if pages is None:
            assert num * self.page_size > stats.free + stats.evictable
            assert not removed
            return None
        assert len(pages) == num
        assert not removed or num * self.page_size > stats.free, "evicted without need"
        assert not any(cover[prefix] for prefix in removed), "evicted a locked prefix"
        assert set(removed) == expected, "evicted others than the policy's first"
        self.counts["evictions"] += bool(removed)
        for prefix in removed:
            self.forget(prefix)
        for page in pages.tolist():
            assert 1 <= page <= self.num_pages
            assert page not in self.held
            self.held.add(page)
            self.store[page] = None
        return pages

    def forget(self, prefix: Prefix) -> None:
        del self.cached[prefix], self.facts[prefix]

    def free(self, pages: list[int]) -> None:
        self.held -= set(pages)
        for page in pages:
            self.store[page] = None
        self.cache.free(np.array(pages, np.int32))

    def extend(self, seq: Seq | None = None) -> None:
        if seq is None:
            if not self.seqs:
                return self.start()
            seq = self.rng.choice(self.seqs)
        first, most = (
            seq.handle.num_tokens // self.page_size,
            min(len(seq.ids) // self.page_size, len(seq.table)),
        )
        num = self.rng.randint(first, most) if self.rng.random() < 0.5 else most
        path = self.prefixes(seq.namespace, seq.ids[: num * self.page_size])
        expected = []
        for prefix, page in zip(path[first:], seq.table[first:], strict=False):
            if prefix in self.cached or not self.enabled:
                expected.append(page)
            else:
                self.cached[prefix] = page
                self.facts[prefix] = Facts()
                self.held.remove(page)
        table = np.array(seq.table[:num], np.int32)
        returned = self.cache.extend(
            seq.handle,
            np.array(seq.ids[: num * self.page_size], np.int32),
            table,
            priority=seq.priority,
        )
        table[:] = 0  # the caller's arrays stay the caller's
        assert returned.tolist() == expected
        assert seq.handle.num_tokens == num * self.page_size
        seq.private += expected
        self.counts["duplicates"] += len(expected)
        if self.enabled:
            self.use(path)
            for prefix in path:
                facts = self.facts[prefix]
                facts.priority, facts.longest = (
                    max(facts.priority, seq.priority),
                    max(facts.longest, num * self.page_size),
                )
        return None

    def finish(self) -> None:
        if self.seqs:
            seq = self.rng.choice(self.seqs)
            self.extend(seq)
            self.drop(seq)

    def retract(self) -> None:
        if self.seqs:
            self.drop(self.rng.choice(self.seqs))

    def drop(self, seq: Seq) -> None:
        self.free(seq.private + seq.table[seq.handle.num_tokens // self.page_size :])
        for _ in range(self.rng.randint(1, 2)):
            seq.handle.release()
        self.seqs.remove(seq)

    def alloc_scratch(self) -> None:
        pages = self.alloc(self.rng.choice((0, 1, 1, 2, self.num_pages // 2, self.num_pages)))
        if pages is not None:
            self.scratch.append(pages)

    def free_scratch(self) -> None:
        if self.scratch:
            self.free(self.scratch.pop(self.rng.randrange(len(self.scratch))).tolist())

    def touch(self) -> None:
        """A whole path: where a prefix ends inside an edge only the tree knows what else is
        refreshed."""
        inner = {(namespace, tokens[: -self.page_size]) for namespace, tokens in self.cached}
        leaves = [prefix for prefix in self.cached if prefix not in inner]
        if leaves:
            namespace, tokens = self.rng.choice(leaves)
            self.cache.touch(np.array(tokens, np.int32), namespace)
            self.use(self.prefixes(namespace, list(tokens)))

    def peek(self) -> None:
        namespace, ids = self.random_ids()
        num_cached = len(self.longest(namespace, ids)) * self.page_size
        assert self.cache.peek(np.array(ids, np.int32), namespace) == num_cached
        assert self.cache.trace(np.array(ids, np.int32), namespace)[0] == num_cached
        cover, some = self.cover(), self.rng.sample(self.seqs, self.rng.randint(0, len(self.seqs)))
        theirs = Counter(prefix for seq in some for prefix in self.settled(seq))
        alone = sum(cover[prefix] == count for prefix, count in theirs.items())
        assert self.cache.num_unlocked_by(seq.handle for seq in some) == alone * self.page_size

    def flush(self) -> None:
        cover = self.cover()
        gone = [prefix for prefix in self.cached if not cover[prefix]]
        assert self.cache.flush() == len(gone) * self.page_size
        for prefix in gone:
            self.forget(prefix)

    STEPS = (
        (start, 20),
        (grow, 30),
        (extend, 20),
        (finish, 8),
        (retract, 6),
        (alloc_scratch, 6),
        (free_scratch, 8),
        (touch, 5),
        (peek, 5),
        (flush, 0.3),
    )

    def step(self) -> None:
        functions, weights = zip(*self.STEPS, strict=True)
        function = self.rng.choices(functions, weights)[0]
        self.counts[function.__name__] += 1
        function(self)
        self.verify()

    def verify(self) -> None:
        assert self.cache.check() == []
        cover = self.cover()
        assert self.tree() == {
            prefix: (page, cover[prefix]) for prefix, page in self.cached.items()
        }
        stats = self.cache.pool_stats()
        locked, held = len(cover) * self.page_size, len(self.held) * self.page_size
        evictable = len(self.cached) * self.page_size - locked
        assert (stats.evictable, stats.locked, stats.held) == (evictable, locked, held)
        assert (
            stats.free + stats.evictable + stats.locked + stats.held
            == stats.total
            == self.num_pages * self.page_size
        )
        assert not self.held & set(self.cached.values()), "a page has two owners"
        for prefix, page in self.cached.items():
            assert self.store[page] == prefix, "a cached page does not hold what the tree says"
        for seq in self.seqs:
            assert seq.handle.pages().tolist() == [
                self.cached[prefix] for prefix in self.settled(seq)
            ]
            for index, page in enumerate(seq.table):
                expected = (seq.namespace, tuple(seq.ids[: (index + 1) * self.page_size]))
                assert self.store[page] == expected, "a page in use was rewritten"


def run(
    page_size: int, vocabulary: int, num_worlds: int, *, enabled: bool = True, policy: str = "lru"
) -> Counter[str]:
    counts: Counter[str] = Counter()
    for number in range(num_worlds):
        world = World(
            random.Random(f"{page_size} {vocabulary} {number}"),
            page_size,
            vocabulary,
            enabled,
            policy,
        )
        for index in range(STEPS_PER_WORLD):
            try:
                world.step()
            except AssertionError as error:
                error.add_note(
                    f"world {number} of page size {page_size}, vocabulary {vocabulary}, enabled"
                    f" {enabled}, {policy}, step {index}"
                )
                raise
        counts += world.counts
    return counts


@pytest.mark.cases(4)
@pytest.mark.parametrize("vocabulary", [2, 3])
@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("num_worlds", [12, pytest.param(50, marks=pytest.mark.full)])
def test_cache_agrees_with_the_model(num_worlds: int, page_size: int, vocabulary: int) -> None:
    counts = run(page_size, vocabulary, num_worlds)
    # The run is worth something only if it went where the bugs are.
    assert min(counts["evictions"], counts["duplicates"], counts["flush"]) > 20, counts


@pytest.mark.cases(5)
@pytest.mark.parametrize("page_size", [1, 2])
@pytest.mark.parametrize("policy", ["lfu", "slru", "priority", "tlru"])
@pytest.mark.parametrize("num_worlds", [3, pytest.param(20, marks=pytest.mark.full)])
def test_every_eviction_policy_agrees_with_brute_force(
    num_worlds: int, policy: str, page_size: int
) -> None:
    assert run(page_size, 2, num_worlds, policy=policy)["evictions"] > 50


def test_disabled_cache_keeps_one_rule_for_its_callers() -> None:
    assert run(2, 2, 3, enabled=False)["duplicates"] > 100
