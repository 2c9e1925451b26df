"""What a sequence holds of the pool: its locked prefix, its private pages, its page table. The only
code that moves pages between the two.

Ownership, page by page of ``seq.pages``:

    [ 0 .. handle.num_tokens )                the tree's, locked by ``seq.handle``, except what is
                                              in ``seq.duplicates``: the tree holds it under other
                                              pages, and it stays private
    [ handle.num_tokens .. len(pages) )       private
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from setpoint.core.plan import PlanBuilder
from setpoint.core.request import Ids
from setpoint.scheduler.cache.manager import KVCache
from setpoint.scheduler.cache.radix import PrefixHandle
from setpoint.scheduler.sequence import Sequence


class Holdings:
    """Works on one cache; keeps no state of its own."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._page = cache.page_size

    def attach(self, seq: Sequence, handle: PrefixHandle, builder: PlanBuilder) -> None:
        """The sequence (already in its slot) takes over a matched, locked prefix."""
        pages = handle.pages()
        if seq.num_retractions == 0:  # coming back is no hit
            self._cache.count_hit(handle, priority=1 - seq.rank)
        seq.handle = handle
        seq.pages.frombytes(pages.tobytes())
        seq.num_scheduled = handle.num_tokens
        builder.map_pages(seq.slot, 0, pages)

    def grow(self, seq: Sequence, num_tokens: int, builder: PlanBuilder) -> bool:
        """Make the page table cover ``num_tokens``; False, with nothing changed, if the pool has
        not enough pages."""
        have = len(seq.pages)
        pages = self._cache.alloc(-(-num_tokens // self._page) - have)
        if pages is None:
            return False
        seq.pages.frombytes(pages.tobytes())
        builder.map_pages(seq.slot, have, pages)
        return True

    def publish(self, seq: Sequence, ids: Ids) -> None:
        """Make the whole pages of ``ids`` (a prefix of the sequence, KV planned or computed)
        matchable by others.

        The prompt ranks one above the output: other requests are likelier to begin with it
        (docs/sglang/scheduling.md#prefix-cache).
        """
        self._extend(seq, ids[: len(seq.prompt)], priority=1 - seq.rank)
        self._extend(seq, ids, priority=-seq.rank)

    def _extend(self, seq: Sequence, ids: Ids, *, priority: int) -> None:
        assert seq.handle is not None
        num_pages = len(ids) // self._page
        if num_pages * self._page <= seq.handle.num_tokens:
            return
        pages = np.frombuffer(seq.pages, dtype=np.int32)[:num_pages].copy()
        duplicates = self._cache.extend(
            seq.handle, ids[: num_pages * self._page], pages, priority=priority
        )
        if len(duplicates):
            seq.duplicates.append(duplicates)

    def release(self, seq: Sequence, *, publish: bool) -> None:
        """Give everything back; ``publish`` first leaves the computed tokens in the tree for
        others.

        Contract: no step in flight names this sequence.
        """
        assert seq.handle is not None
        assert seq.inflight_steps == 0
        if publish:
            self.publish(seq, seq.known_ids()[: seq.num_scheduled])
        shared = seq.handle.num_tokens // self._page
        self._cache.free(np.frombuffer(seq.pages, dtype=np.int32)[shared:].copy())
        for pages in seq.duplicates:
            self._cache.free(pages)
        seq.handle.release()
        seq.handle = None
        seq.pages = type(seq.pages)("i")
        seq.duplicates = []
        seq.num_scheduled = 0

    def num_returned_by(self, seqs: Iterable[Sequence]) -> int:
        """Tokens that could be had anew if exactly these sequences gave up their memory."""
        held = list(seqs)
        handles = [seq.handle for seq in held if seq.handle is not None]
        return self._cache.num_unlocked_by(handles) + self._page * sum(
            map(self.private_pages, held)
        )

    def private_pages(self, seq: Sequence) -> int:
        """Pages outside the tree that the sequence owns."""
        if seq.handle is None:
            return 0
        return (
            len(seq.pages)
            - seq.handle.num_tokens // self._page
            + sum(len(pages) for pages in seq.duplicates)
        )
