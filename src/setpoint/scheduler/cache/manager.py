"""The KV cache as the scheduler sees it: a page pool and a radix tree over it, with eviction in
between.

Works on token ids and page numbers. It does not know sequences, steps or KV data. At every moment
each page has exactly one owner:

    free list ── alloc ──▶ caller ("held") ── extend ──▶ tree (locked ⇄ evictable)
        ▲                    │ free                          │ alloc, flush
        └────────────────────┴───────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

import numpy as np

from setpoint.core.messages import Blocks, Cached
from setpoint.core.pagerows import PageRow
from setpoint.core.pool import PoolStats
from setpoint.core.request import Ids
from setpoint.scheduler.cache.evict import eviction_policy as policy_of
from setpoint.scheduler.cache.handle import NO_PAGES, PrefixHandle
from setpoint.scheduler.cache.news import TreeListener
from setpoint.scheduler.cache.page_list import PagePool
from setpoint.scheduler.cache.radix import RadixTree
from setpoint.scheduler.cache.soundness import tree_problems
from setpoint.scheduler.cache.window_pages import WindowPages


@dataclass(slots=True, frozen=True, kw_only=True)
class CacheConfig:
    """The arguments of a KVCache, as a value that can be kept."""

    num_pages: int
    page_size: int
    row: PageRow = field(default_factory=PageRow)
    enabled: bool = True
    eviction_policy: str = "lru"
    eviction_parameters: dict[str, int] = field(default_factory=dict)

    def empty_cache(self) -> KVCache:
        return KVCache(**{each.name: getattr(self, each.name) for each in fields(self)})


class KVCache:
    """Prefix cache over ``num_pages`` pages of ``page_size`` tokens; all counts are in pool tokens
    (``core.pagerows``) unless named pages, lengths of prefixes in tokens.

    Contract: free + evictable + locked + held == total after every call, where held is what callers
    own outside the tree. Namespaces never share a prefix. Arrays of pages are page rows, flat: with
    one group a page per ``page_size`` tokens.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        row: PageRow | None = None,
        enabled: bool = True,
        eviction_policy: str = "lru",
        eviction_parameters: Mapping[str, int] | None = None,
    ) -> None:
        """``enabled=False`` caches nothing: match finds nothing and extend hands every page back to
        the caller.

        row: the model's groups; by default one group that keeps every position.
        eviction_parameters: keyword arguments of the policy. Raises ValueError for a pool without
        pages, a page size below 1 or an unknown policy.
        """
        self.page_size = page_size
        self.total_tokens = num_pages * page_size
        self.row = row or PageRow()
        self.enabled = enabled
        self._policy = policy_of(eviction_policy, **(eviction_parameters or {}))
        self._num_pages = num_pages
        self._listeners: list[TreeListener] = []
        self.reset()

    @property
    def free_tokens(self) -> int:
        return self._pool.available * self.page_size

    @property
    def evictable_tokens(self) -> int:
        return self._tree.num_evictable

    @property
    def locked_tokens(self) -> int:
        return self._tree.num_locked

    def pool_stats(self) -> PoolStats:
        free, evictable, locked = self.free_tokens, self.evictable_tokens, self.locked_tokens
        held = self.total_tokens - free - evictable - locked
        return PoolStats(
            total=self.total_tokens, free=free, evictable=evictable, locked=locked, held=held
        )

    def peek(self, ids: Ids, namespace: str = "") -> int:
        """Length of the longest cached prefix of ``ids`` that a sequence can continue, floored to
        whole pages. Takes no lock, splits no stretch, refreshes no recency."""
        return self._tree.match_len(ids, namespace)

    def trace(self, ids: Ids, namespace: str = "") -> tuple[int, tuple[int, ...]]:
        """(result of :meth:`peek`, numbers of the cached stretches that the prefix runs through, in
        order). Equal numbers mean the same stretch; the last one may be matched in part. The
        numbers are void once the tree has changed.
        """
        return self._tree.trace(ids, namespace)

    def num_unlocked_by(self, handles: Iterable[PrefixHandle], needed: Ids = NO_PAGES) -> int:
        """Tokens that would become evictable if exactly these handles were released and ``needed``
        were given back: those of the stretches that no other handle locks.

        needed: the window pages that the sequences of these handles need, whoever owns the pages.
        """
        unlocked = self._tree.num_unlocked_by(handles) * self.row.num_full
        if self._windows is None:
            return unlocked
        return unlocked + self._windows.num_freed_by(needed) * self.page_size

    def match(self, ids: Ids, namespace: str = "") -> PrefixHandle:
        """Find the longest cached prefix of ``ids`` that a sequence can continue, floored to whole
        pages; lock it and refresh its recency.

        The caller leaves out the tokens that must be computed again: to get logits for the last one
        it passes ``ids[: n - 1]``.
        """
        return self._tree.match(ids, namespace)

    def count_hit(self, handle: PrefixHandle, *, priority: int = 0) -> None:
        """Record that a request of this priority was admitted with the handle's prefix, for
        eviction policies that count hits. It is not part of ``match``, because a request that is
        not admitted matches again at every step.
        """
        self._tree.count_hit(handle, priority)

    def touch(self, ids: Ids, namespace: str = "") -> None:
        """Make the cached prefix of ``ids`` the most recently used one. Takes no lock, splits no
        stretch."""
        self._tree.touch(ids, namespace)

    def alloc(self, num_pages: int) -> Ids | None:
        """Allocate ``num_pages`` pages, which the caller holds from now on. Returns None and evicts
        nothing if fewer are free or evictable.

        Evicts only when the free list is too short: whole unlocked leaves in policy order (see
        ``RadixTree.evict``), which may free more than was asked for.
        """
        short = num_pages - self._pool.available
        if short > 0:
            if short * self.page_size > self._tree.num_evictable:
                return None
            self._pool.free(self._tree.evict(short * self.page_size))
        return self._pool.alloc(num_pages)

    def free(self, pages: Ids) -> None:
        """Give back pages that the caller holds. Asserts that none of them is free already."""
        self._pool.free(pages)

    def give_back(self, handle: PrefixHandle, pages: Ids, first_row: int) -> None:
        """Give back window pages that a sequence no longer needs, of rows from ``first_row`` on.
        Private ones are freed; the tree's can be evicted once no sequence needs them.
        """
        self._pool.free(self._tree.unneed(handle, pages, first_row))

    def num_private(self, pages: Ids) -> int:
        """Number of these window pages that are private, that is, not the tree's."""
        return 0 if self._windows is None else self._windows.num_outside(pages)

    def oldest(self, num_tokens: int) -> list[tuple[Ids, str]]:
        """The paths of the leaves that would be evicted first, of about so many tokens together, as
        (their tokens from position 0, namespace)."""
        return self._tree.oldest(num_tokens)

    def extend(self, handle: PrefixHandle, ids: Ids, pages: Ids, *, priority: int = 0) -> Ids:
        """Cache ``ids`` and move the handle's lock down to cover all of them; returns the pages the
        caller must free itself.

        ids: whole pages, beginning with the handle's prefix. pages: the page rows, one per page of
        ids. Rows below ``handle.num_tokens`` are ignored; those beyond are held by the caller, with
        0 where it has given a window page back. priority: the minimum priority of the stretch and
        of everything above it (eviction policy "priority").

        Contract, for groups that keep every position:

        * Beyond ``handle.num_tokens`` the tree adopts the pages of every stretch that it does not
          have. Where another sequence was faster, the tree keeps its own pages and returns the
          caller's: the caller keeps those private copies (its page table stays valid, and steps in
          flight may be writing them) and frees them when it is done.
        * Afterwards ``handle.num_tokens == len(ids)``, so no page is ever returned twice: of a page
          table that was extended chunk by chunk, the caller must free what extend returned and what
          lies beyond ``handle.num_tokens``, and nothing else.
        * With the cache disabled the same rule holds: all pages of the stretch are returned, and
          the handle counts the tokens but locks nothing (``handle.pages()`` stays empty).

        With window groups, stretches that no sequence holds exchange their pages for the caller's,
        and none of those are returned. Window pages are given back with ``give_back``, whoever owns
        them by then. Allocates no page and evicts nothing, so it cannot fail.
        """
        width = self.row.width
        assert len(ids) * width == len(pages) * self.page_size, "ids must fill their pages"
        start = handle.num_tokens
        assert len(ids) >= start, "the handle is longer than ids"
        own = pages[start // self.page_size * width :]
        if not self.enabled:
            handle.move(handle.node, len(ids))
            return own.reshape(-1, width)[:, : self.row.num_full].flatten()
        private, freed = self._tree.extend(handle, ids[start:], own, priority)
        if len(freed):
            self._pool.free(freed)
        return private

    def listen(self, listener: TreeListener) -> None:
        """Tell a listener, from the beginning of the cache, what it gains and loses."""
        self._listeners.append(listener)

    def take_news(self) -> list[Cached | Blocks]:
        """What the listeners say has changed since the last call."""
        found = [listener.take() for listener in self._listeners]
        return [news for news in found if news is not None]

    def flush(self) -> int:
        """Drop every stretch that no handle locks; returns the number of tokens freed."""
        num_tokens = self._tree.num_evictable
        self._pool.free(self._tree.evict(num_tokens))
        return num_tokens

    def drop_locked(self) -> Ids:
        """Drop every stretch, also locked ones, and return the pages of the locked ones, which the
        caller holds from now on. Handles that exist lock nothing any more; releasing them is
        harmless."""
        self.flush()
        pages = self._tree.all_pages()
        self._plant()
        return pages

    def reset(self) -> None:
        """Empty the cache and start over, to repair a pool whose accounting is broken. No caller
        may hold a page or a handle."""
        self._pool = PagePool(self._num_pages)
        self._plant()

    def _plant(self) -> None:
        """Begin a new, empty tree."""
        self._windows = (
            WindowPages(self.row, num_pages=self._num_pages, page_size=self.page_size)
            if self.row.windows
            else None
        )
        self._tree = RadixTree(
            self.page_size, self._policy, num_full=self.row.num_full, windows=self._windows
        )
        self._tree.listeners = self._listeners
        for listener in self._listeners:
            listener.cleared()

    def check(self) -> list[str]:
        """Every violated invariant, as a sentence; empty = sound. O(pool + tree): for tests and
        idle moments."""
        problems = self._pool.check() + tree_problems(self._tree)
        cached = self._tree.all_pages()
        if len(np.unique(cached)) != len(cached):
            problems.append("The tree holds a page twice.")
        if len(cached) and (cached.min() < 1 or cached.max() > self._pool.num_pages):
            problems.append("The tree holds a page that does not exist.")
        elif self._pool.any_free(cached):
            problems.append("The tree holds a page that is free.")
        stats = self.pool_stats()
        if min(stats.free, stats.evictable, stats.locked, stats.held) < 0:
            problems.append(f"A count is negative: {stats}.")
        return problems
