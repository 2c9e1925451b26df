"""The free list of KV pages: hands out page numbers and takes them back. Does not know what is in a
page or who holds it."""

from __future__ import annotations

import numpy as np

from setpoint.core.request import Ids


class PagePool:
    """Pages 1..num_pages; page 0 is the dummy page and is never handed out.

    Contract: every page is either free or handed out exactly once; freeing a page that is free is
    an AssertionError.
    """

    __slots__ = ("_available", "_free", "_is_free", "num_pages")

    def __init__(self, num_pages: int) -> None:
        """Raises ValueError for a pool without pages."""
        if num_pages < 1:
            raise ValueError(f"A page pool needs at least one page, got {num_pages}.")
        self.num_pages = num_pages
        # A stack whose top is at _available. It is reversed, so pages leave in ascending order, and
        # a run of pages that is returned leaves again as the same run: pages that follow each other
        # in a sequence stay adjacent in memory.
        self._free = np.arange(num_pages, 0, -1, dtype=np.int32)
        self._available = num_pages
        self._is_free = np.ones(num_pages + 1, np.bool_)
        self._is_free[0] = False

    @property
    def available(self) -> int:
        return self._available

    def alloc(self, n: int) -> Ids | None:
        """Take ``n`` pages, in a new array. Returns None and takes nothing if fewer are free."""
        assert n >= 0, n
        rest = self._available - n
        if rest < 0:
            return None
        pages = self._free[rest : self._available][::-1].copy()
        self._is_free[pages] = False
        self._available = rest
        return pages

    def free(self, pages: Ids) -> None:
        """Take pages back. The array stays the caller's."""
        assert not self.any_free(pages), f"pages freed twice: {pages[self._is_free[pages]]}"
        end = self._available + len(pages)
        self._free[self._available : end] = pages[::-1]
        self._is_free[pages] = True
        self._available = end

    def any_free(self, pages: Ids) -> bool:
        return bool(np.count_nonzero(self._is_free.take(pages)))

    def check(self) -> list[str]:
        """Every violated invariant, as a sentence; empty = sound. O(num_pages)."""
        listed = self._free[: self._available]
        problems = []
        if len(np.unique(listed)) != self._available:
            problems.append("The free list holds a page twice.")
        if np.count_nonzero(self._is_free) != self._available or not self._is_free[listed].all():
            problems.append("The free list and the free marks disagree.")
        if self._is_free[0]:
            problems.append("The dummy page is marked free.")
        return problems
