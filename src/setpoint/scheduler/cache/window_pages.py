"""The pages of window groups in the radix tree: which pages running sequences need, which prefixes
are usable, and which pages are evicted first.

Works on page rows (``core.pagerows.PageRow``) and the fields of nodes. It does not know ids, the
free list or sequences: a caller calls ``need`` once for the pages that it needs, and ``unneed``
once. A model without window groups has no such object.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from setpoint.core.pagerows import PageRow
from setpoint.core.request import Ids
from setpoint.scheduler.cache.node import TreeNode

Rows = npt.NDArray[np.int32]
"""[rows, columns] page numbers, 0 where there is none."""
OUTSIDE = -1


class WindowPages:
    """Contract: each page of a window group that the tree holds is either *needed* by one or more
    running sequences, or evictable. Every node with an evictable page is in one of two queues."""

    def __init__(self, row: PageRow, *, num_pages: int, page_size: int) -> None:
        self.row = row
        self._page = page_size
        self._needed = np.full(num_pages + 1, OUTSIDE, np.int32)
        """For each page, how many sequences need it; OUTSIDE if it is not one of the tree's."""
        self.num_evictable = 0
        self.num_locked = 0
        """Number of pages, as is ``num_evictable``."""
        self._loose: OrderedDict[TreeNode, None] = OrderedDict()
        """Nodes that may have evictable pages, the least recently used first."""
        self._kept: OrderedDict[TreeNode, None] = OrderedDict()
        """Nodes whose evictable pages all lie just before a place where a match is likely to
        end."""

    # ------------------------------------------------------------------ matching

    def rows_of(self, pages: bytes | Ids) -> Rows:
        """The page rows of a node or a path as [rows, columns]: a view, read-only if ``pages``
        is."""
        flat = np.frombuffer(pages, np.int32) if isinstance(pages, bytes) else pages
        return flat.reshape(-1, self.row.width)

    def num_usable(self, rows: Rows) -> int:
        """Length, in rows, of the longest prefix of a path that a sequence can continue: at its
        end, every window group still has the pages that its window reaches back to."""
        ends = np.arange(1, len(rows) + 1)
        usable = np.ones(len(rows), np.bool_)
        for columns in self.row.windows:
            behind = np.maximum(ends * self._page - columns.window + 1, 0)
            first = behind // self.row.read_step * self.row.read_step // self._page
            gaps = ~rows[:, columns.begin : columns.end].all(axis=1)
            last_gap = np.maximum.accumulate(np.where(gaps, ends - 1, -1))
            usable &= last_gap < first
        found = np.flatnonzero(usable)
        return int(found[-1]) + 1 if len(found) else 0

    def reached(self, rows: Rows) -> Rows:
        """A copy of a usable path's rows without the window pages that a sequence continuing it
        does not reach back to."""
        rows = rows.copy()
        for columns in self.row.windows:
            first = self.row.first_needed(columns, len(rows) * self._page) // self._page
            rows[:first, columns.begin : columns.end] = 0
        return rows

    # ------------------------------------------------------------------ who needs what

    def need(self, pages: Ids) -> None:
        """Record that one more sequence needs these pages of the tree, each listed once."""
        newly = int(np.count_nonzero(self._needed[pages] == 0))
        self._needed[pages] += 1
        self.num_evictable -= newly
        self.num_locked += newly

    def unneed(self, pages: Ids, path: Iterable[TreeNode]) -> Ids:
        """Record that a sequence no longer needs these pages. Returns the pages among them that are
        not the tree's.

        path: the nodes that hold the others.
        """
        counts = self._needed[pages]
        inside = pages[counts != OUTSIDE]
        self._needed[inside] -= 1
        newly = int(np.count_nonzero(counts == 1))
        self.num_evictable += newly
        self.num_locked -= newly
        if newly:
            for node in path:
                self._kept.pop(node, None)
                self._loose[node] = None
                self._loose.move_to_end(node)
        outside: Ids = pages[counts == OUTSIDE]
        return outside

    def num_outside(self, pages: Ids) -> int:
        """Number of these pages that are not the tree's."""
        return int(np.count_nonzero(self._needed[pages] == OUTSIDE))

    def num_freed_by(self, pages: Ids) -> int:
        """Number of the tree's pages that no sequence would need any more if each entry of
        ``pages`` (which may repeat) took away one sequence that needs the page."""
        distinct, counts = np.unique(pages, return_counts=True)
        return int(np.count_nonzero(self._needed[distinct] == counts))

    # ------------------------------------------------------------------ growing

    def adopt(self, rows: Rows) -> None:
        """Make the pages of these rows the tree's; the sequence that held them still needs them."""
        pages = _page_numbers(rows[:, self.row.num_full :])
        self._needed[pages] = 1
        self.num_locked += len(pages)

    def merge(self, node: TreeNode, own: Rows) -> tuple[Ids, Ids]:
        """Merge a sequence's own rows for the stretch of a node into the tree. Returns (its pages
        of full groups that stay private, pages of the tree that are free now).

        If no sequence holds the stretch, this one's pages replace the tree's, so no stretch is kept
        twice. Otherwise the tree keeps its pages and takes the window pages that it lacks.
        """
        rows, num_full = self.rows_of(node.pages).copy(), self.row.num_full
        theirs, given = rows[:, num_full:], own[:, num_full:]
        if node.lock_ref:
            private, freed = _page_numbers(own[:, :num_full]), np.zeros(0, np.int32)
            taken = (theirs == 0) & (given != 0)
        else:
            taken = given != 0
            freed = self._forget(theirs[taken & (theirs != 0)])
            freed = np.concatenate((_page_numbers(rows[:, :num_full]), freed))
            private = np.zeros(0, np.int32)
            rows[:, :num_full] = own[:, :num_full]
        theirs[taken] = given[taken]
        self._needed[given[taken]] = 1
        self.num_locked += int(np.count_nonzero(taken))
        node.pages = rows.tobytes()
        return private, freed

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """Queue the upper part of a stretch that was cut in two, if the lower part is queued."""
        for queue in (self._loose, self._kept):
            if lower in queue:
                self._loose[upper] = None

    # ------------------------------------------------------------------ eviction

    def look_again(self, node: TreeNode) -> None:
        """Let eviction reconsider a node whose number of children has changed: the pages just
        before its end may no longer be worth sparing."""
        if node in self._kept:
            del self._kept[node]
            self._loose[node] = None

    def remove(self, node: TreeNode) -> Ids:
        """Forget an unlocked node, which leaves the tree. Returns its pages, of all groups."""
        rows = self.rows_of(node.pages)
        self._forget(_page_numbers(rows[:, self.row.num_full :]))
        self._loose.pop(node, None)
        self._kept.pop(node, None)
        return _page_numbers(rows)

    def give_up_loose(self) -> Ids | None:
        """Take the evictable pages of the least recently used node, except those just before its
        end if the node is a leaf or a fork. Returns None if no node is left."""
        if not self._loose:
            return None
        node, _ = self._loose.popitem(last=False)
        likely_end = len(node.children) != 1
        given, more = self._give_up(node, spare_end=likely_end)
        if more:
            self._kept[node] = None
        return given

    def give_up_rest(self) -> Ids | None:
        """Take all evictable pages of the next node, including those that ``give_up_loose`` spared.
        Returns None if no node is left."""
        queue = self._kept or self._loose
        if not queue:
            return None
        node, _ = queue.popitem(last=False)
        return self._give_up(node, spare_end=False)[0]

    def _give_up(self, node: TreeNode, *, spare_end: bool) -> tuple[Ids, bool]:
        """Take evictable pages of a node. Returns (the pages, whether evictable ones are left).

        spare_end: leave those that a match at the node's end reaches back to."""
        rows = self.rows_of(node.pages)
        window_pages = rows[:, self.row.num_full :]
        evictable = (window_pages != 0) & (self._needed[window_pages] == 0)
        going = evictable.copy()
        if spare_end:
            for columns in self.row.windows:
                reach = columns.window - 1 + self.row.read_step - 1
                first = max(len(rows) - -(-reach // self._page), 0)
                begin, end = columns.begin - self.row.num_full, columns.end - self.row.num_full
                going[first:, begin:end] = False
        given = self._forget(window_pages[going])
        if len(given):
            rows = rows.copy()
            rows[:, self.row.num_full :][going] = 0
            node.pages = rows.tobytes()
        return given, bool((evictable & ~going).any())

    def _forget(self, pages: Ids) -> Ids:
        """Take evictable pages from the tree. Returns them."""
        assert not self._needed[pages].any(), "a page that is needed, or not the tree's"
        self._needed[pages] = OUTSIDE
        self.num_evictable -= len(pages)
        return pages

    # ------------------------------------------------------------------ soundness

    def check(self, nodes: Iterable[TreeNode]) -> list[str]:
        """Every violated invariant, as a sentence; empty = sound. O(tree)."""
        problems, found = [], []
        for node in nodes:
            pages = _page_numbers(self.rows_of(node.pages)[:, self.row.num_full :])
            found.append(pages)
            if not (self._needed[pages] >= 0).all():
                problems.append("A node holds a window page that is not counted as the tree's.")
            if not (node.lock_ref or (self._needed[pages] <= 0).all()):
                problems.append("A window page is needed on a path that nobody holds.")
            waits = node in self._loose or node in self._kept
            if (self._needed[pages] == 0).any() and not waits:
                problems.append("A node has evictable window pages but waits in no queue.")
        pages = np.concatenate(found) if found else np.zeros(0, np.int32)
        if np.count_nonzero(self._needed != OUTSIDE) != len(pages):
            problems.append("A page counts as the tree's window page, but no node holds it.")
        counts = (
            int(np.count_nonzero(self._needed[pages] == 0)),
            int(np.count_nonzero(self._needed[pages] > 0)),
        )
        if counts != (self.num_evictable, self.num_locked):
            problems.append(
                f"The tree counts {self.num_evictable} evictable and {self.num_locked} needed"
                f" window pages but holds {counts[0]} and {counts[1]}."
            )
        return problems


def _page_numbers(pages: Rows) -> Ids:
    """The page numbers in these columns, flat, without the zeros."""
    numbers: Ids = pages[pages != 0]
    return numbers
