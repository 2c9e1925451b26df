"""What a sequence holds in the pool: its locked prefix, its private pages, its page rows. No other
code moves pages between the sequence and the tree.

Ownership, row by row of ``seq.pages`` (``core.pagerows``):

    columns of groups that keep every position
    [ 0 .. handle.num_tokens )                the tree's, locked by ``seq.handle``, except what is
                                              in ``seq.duplicates``: the tree holds it under other
                                              pages, and it stays private
    [ handle.num_tokens .. len(pages) )       private

    columns of a window
    [ 0 .. first_rows )                       given back: 0
    [ first_rows .. len(pages) )              needed, whether the tree's or private: the cache knows
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import numpy as np
import numpy.typing as npt

from setpoint.core.plan import PlanBuilder
from setpoint.core.request import Ids
from setpoint.scheduler.cache.handle import NO_PAGES, PrefixHandle
from setpoint.scheduler.cache.manager import KVCache
from setpoint.scheduler.sequence import Sequence


class Holdings:
    """Operations on the pages of sequences in one cache; keeps no state of its own."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._page = cache.page_size
        self._row = cache.row
        self._width = cache.row.width

    def attach(self, seq: Sequence, handle: PrefixHandle, builder: PlanBuilder) -> None:
        """Give a matched and locked prefix to the sequence, which already has its slot."""
        pages = handle.pages()
        if seq.num_retractions == 0:  # a sequence that comes back after a retraction is no hit
            self._cache.count_hit(handle, priority=1 + seq.urgency)
        seq.handle = handle
        seq.pages.frombytes(pages.tobytes())
        seq.num_scheduled = handle.num_tokens
        builder.map_pages(seq.slot, 0, pages)
        if self._row.windows:
            handle.needed = NO_PAGES  # the sequence gives them back as its windows advance
            seq.first_rows = [
                self._row.first_needed(columns, handle.num_tokens) // self._page
                for columns in self._row.windows
            ]
            seq.slide_at = 0

    def num_covered(self, seq: Sequence) -> int:
        """Number of tokens that the sequence's page rows have room for."""
        return len(seq.pages) // self._width * self._page

    def grow(self, seq: Sequence, num_tokens: int, builder: PlanBuilder) -> bool:
        """Make the page rows cover ``num_tokens``. Returns False, with nothing changed, if the pool
        has too few pages."""
        have = len(seq.pages) // self._width
        pages = self._cache.alloc((-(-num_tokens // self._page) - have) * self._width)
        if pages is None:
            return False
        seq.pages.frombytes(pages.tobytes())
        builder.map_pages(seq.slot, have, pages)
        return True

    def grow_each(self, growth: list[tuple[Sequence, int]], builder: PlanBuilder) -> None:
        """Add the given number of page rows to each of these sequences. The pool must have the
        pages."""
        width = self._width
        pages = self._cache.alloc(sum(count for _, count in growth) * width)
        assert pages is not None, "the caller has counted them"
        numbers = iter(pages.tolist())
        slots, indices = [], []
        for seq, count in growth:
            have = len(seq.pages) // width
            if count == 1:
                slots.append(seq.slot)
                indices.append(have)
            else:
                slots += [seq.slot] * count
                indices += range(have, have + count)
            if count * width == 1:  # with pages of one token all rows of a decode step come here
                seq.pages.append(next(numbers))
            else:
                seq.pages.extend(islice(numbers, count * width))
        builder.map_each(slots, indices, pages)

    def slide(self, seq: Sequence) -> None:
        """Give back the window pages that no token still to be computed reaches back to.

        The first such token is at min(scheduled, known - 1), because what is scheduled beyond it
        may be subtracted again. The bound is rounded down to a page, so that another sequence can
        still continue at the end of the last whole page.
        """
        if not seq.first_rows or seq.num_scheduled < seq.slide_at:
            return
        begin = min(seq.num_scheduled, seq.num_known - 1) // self._page * self._page
        bounds = []
        for index, columns in enumerate(self._row.windows):
            first = self._row.first_needed(columns, begin) // self._page
            if first > seq.first_rows[index]:
                self._give_back(seq, index, first)
            next_first = (seq.first_rows[index] + 1) * self._page
            step = self._row.read_step
            bounds.append(-(-next_first // step) * step + columns.window - 1)
        seq.slide_at = min(bounds)

    def _give_back(self, seq: Sequence, index: int, first: int) -> None:
        """Give back the pages of the index-th window in the rows before ``first``."""
        assert seq.handle is not None
        columns, before = self._row.windows[index], seq.first_rows[index]
        rows = self._rows(seq)[before:first, columns.begin : columns.end]
        pages = rows.flatten()
        rows[:] = 0
        seq.first_rows[index] = first
        self._cache.give_back(seq.handle, pages, before)

    def publish(self, seq: Sequence, ids: Ids) -> None:
        """Cache the whole pages of ``ids``, a prefix of the sequence whose KV is planned or
        computed, so that others can match them.

        The prompt gets a priority one higher than the output, because other requests are more
        likely to begin with it (docs/sglang/scheduling.md#prefix-cache).
        """
        self._extend(seq, ids[: len(seq.prompt)], priority=1 + seq.urgency)
        self._extend(seq, ids, priority=seq.urgency)

    def _extend(self, seq: Sequence, ids: Ids, *, priority: int) -> None:
        assert seq.handle is not None
        num_rows = len(ids) // self._page
        if num_rows * self._page <= seq.handle.num_tokens:
            return
        pages = np.frombuffer(seq.pages, dtype=np.int32)[: num_rows * self._width].copy()
        duplicates = self._cache.extend(
            seq.handle, ids[: num_rows * self._page], pages, priority=priority
        )
        if len(duplicates):
            seq.duplicates.append(duplicates)

    def release(self, seq: Sequence, *, publish: bool) -> None:
        """Give everything back. publish: first leave the computed tokens in the tree for others.

        Contract: no step in flight contains this sequence.
        """
        assert seq.handle is not None
        assert seq.inflight_steps == 0
        if publish:
            self.publish(seq, seq.known_ids()[: seq.num_scheduled])
        for index in range(len(seq.first_rows)):
            self._give_back(seq, index, len(seq.pages) // self._width)
        shared = seq.handle.num_tokens // self._page
        self._cache.free(self._rows(seq)[shared:, : self._row.num_full].flatten())
        for pages in seq.duplicates:
            self._cache.free(pages)
        seq.handle.release()
        seq.handle = None
        seq.pages = type(seq.pages)("i")
        seq.first_rows = []
        seq.duplicates = []
        seq.num_scheduled = 0

    def num_returned_by(self, seqs: Iterable[Sequence]) -> int:
        """Pool tokens that would become available if exactly these sequences gave up their
        memory."""
        held = list(seqs)
        handles = [seq.handle for seq in held if seq.handle is not None]
        needed = np.concatenate([NO_PAGES, *map(self._window_pages, held)])
        return self._cache.num_unlocked_by(handles, needed) + self._page * sum(
            map(self.private_pages, held)
        )

    def private_pages(self, seq: Sequence) -> int:
        """Number of pages outside the tree that the sequence owns."""
        if seq.handle is None:
            return 0
        num_rows = len(seq.pages) // self._width - seq.handle.num_tokens // self._page
        private = self._row.num_full * num_rows + sum(len(pages) for pages in seq.duplicates)
        return private + self._cache.num_private(self._window_pages(seq))

    def reaches_its_windows(self, seq: Sequence) -> bool:
        """Whether the sequence has every page that its next tokens may read."""
        rows, begin = self._rows(seq), min(seq.num_scheduled, seq.num_known - 1)
        return bool(rows[:, : self._row.num_full].all()) and all(
            rows[
                self._row.first_needed(columns, begin) // self._page :, columns.begin : columns.end
            ].all()
            for columns in self._row.windows
        )

    def _window_pages(self, seq: Sequence) -> Ids:
        """The pages of window groups that the sequence needs, both the tree's and its own."""
        if not seq.first_rows:
            return NO_PAGES
        rows = self._rows(seq)[:, self._row.num_full :]
        held: Ids = rows[rows != 0]
        return held

    def _rows(self, seq: Sequence) -> npt.NDArray[np.int32]:
        """The sequence's page rows, [rows, columns]: a view of its own array, which cannot grow
        while the view exists."""
        return np.frombuffer(seq.pages, dtype=np.int32).reshape(-1, self._width)
