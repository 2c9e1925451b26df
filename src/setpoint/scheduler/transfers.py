"""The pages that transfers read or write, each held until its transfer has ended
(``core.transfers``).

Works on the cache. It does not know who moves the pages, when, or why. A load holds private pages
and locks the prefix before them; at its end what has arrived joins the tree, as if it had been
computed. A save locks the path whose pages it reads.

    reserve ── Transfer ──▶ mover ── PagesMoved ──▶ end (rows join the tree, the others are freed)
    hold    ── Transfer ──▶ mover ── PagesMoved ──▶ end (the path is unlocked)

A flush ends no transfer: whatever they read or write leaves the tree, and is free when they end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from setpoint.core.messages import PagesMoved
from setpoint.core.records import Observer, TransferEnded, TransferStarted
from setpoint.core.request import Ids
from setpoint.core.transfers import Direction, KVLocation, Transfer
from setpoint.scheduler.cache.handle import PrefixHandle
from setpoint.scheduler.cache.manager import KVCache

Then = Callable[[int, PagesMoved], object]
"""Called when a transfer has ended, with the number of tokens from the beginning of its ids that
are of use now (0 after a flush), and the message."""


@dataclass(slots=True)
class _Open:
    """A transfer that has not ended."""

    transfer: Transfer
    handle: PrefixHandle | None
    """The locked path: before the rows of a load, or of all that a save reads. None after a
    flush."""
    then: Then


class Transfers:
    """The open transfers of one cache."""

    def __init__(self, cache: KVCache, observer: Observer) -> None:
        self._cache = cache
        self._observer = observer
        self._open: dict[int, _Open] = {}
        self._leaving: list[tuple[Ids, set[int]]] = []
        """Pages that a flush took out of the tree, and the transfers that may still read them."""
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, transfer_id: int) -> bool:
        return transfer_id in self._open

    def __getitem__(self, transfer_id: int) -> Transfer:
        return self._open[transfer_id].transfer

    @property
    def num_held_pages(self) -> int:
        """Number of pages outside the tree that transfers hold."""
        reserved = sum(
            int(np.count_nonzero(each.transfer.rows))
            for each in self._open.values()
            if each.transfer.direction is Direction.LOAD
        )
        return reserved + sum(len(pages) for pages, _ in self._leaving)

    def num_tokens(self, direction: Direction, place: KVLocation) -> int:
        """Number of tokens that the open transfers of a direction move from or to a place."""
        return sum(map(_num_tokens, self._of(direction, place)))

    def num_open(self, direction: Direction, place: KVLocation) -> int:
        return sum(1 for _ in self._of(direction, place))

    def _of(self, direction: Direction, place: KVLocation) -> Iterator[Transfer]:
        for each in self._open.values():
            if each.transfer.direction is direction and each.transfer.place is place:
                yield each.transfer

    def reserve(
        self, place: KVLocation, ids: Ids, namespace: str, then: Then, digests: bytes = b""
    ) -> Transfer | None:
        """Hold new page rows for the whole pages of ``ids`` that the tree does not have, and lock
        the prefix that it has. Returns None, with nothing held, if the tree has all of them or the
        pool has too few pages."""
        cache, row, page = self._cache, self._cache.row, self._cache.page_size
        ids = ids[: len(ids) // page * page]
        handle = cache.match(ids, namespace)
        start = handle.num_tokens
        rows = np.ones(((len(ids) - start) // page, row.width), np.int32)
        for columns in row.windows:
            first = row.first_needed(columns, len(ids)) // page - start // page
            rows[: max(first, 0), columns.begin : columns.end] = 0
        pages = cache.alloc(int(np.count_nonzero(rows))) if len(rows) else None
        if pages is None:
            handle.release()
            return None
        rows[rows != 0] = pages
        return self._add(
            Transfer(
                self._take_id(),
                Direction.LOAD,
                place,
                rows.ravel(),
                start,
                ids.copy(),
                namespace,
                digests,
            ),
            handle,
            then,
        )

    def hold(
        self,
        place: KVLocation,
        ids: Ids,
        namespace: str,
        start: int,
        then: Then,
        digests: bytes = b"",
    ) -> Transfer | None:
        """Lock the path of ``ids`` as far as the tree has it. The transfer saves the rows from
        position ``start`` on; None, with nothing locked, if the path ends before."""
        page = self._cache.page_size
        handle = self._cache.match(ids, namespace)
        if handle.num_tokens <= start:
            handle.release()
            return None
        rows = handle.pages().reshape(-1, self._cache.row.width)[start // page :]
        return self._add(
            Transfer(
                self._take_id(),
                Direction.SAVE,
                place,
                rows.flatten(),
                start,
                ids[: handle.num_tokens].copy(),
                namespace,
                digests,
            ),
            handle,
            then,
        )

    def end(self, message: PagesMoved) -> None:
        """Give up what a transfer held, after its ``PagesMoved``. What a load brought joins the
        tree. Does nothing for a transfer that has ended."""
        found = self._open.pop(message.id, None)
        if found is None:
            return
        transfer, handle = found.transfer, found.handle
        moved = min(message.num_tokens, _num_tokens(transfer))
        moved = moved // self._cache.page_size * self._cache.page_size
        reached = transfer.start + moved
        if handle is None:
            reached = 0
        if transfer.direction is Direction.LOAD:
            self._settle(transfer, handle, moved)
        if handle is not None:
            handle.release()
        self._let_go(message.id)
        self._observer.on(
            TransferEnded(
                transfer.id,
                transfer.direction,
                transfer.place,
                moved,
                _num_tokens(transfer) - moved,
                message.num_bytes,
                message.seconds,
                message.why,
            )
        )
        found.then(reached, message)

    def _settle(self, transfer: Transfer, handle: PrefixHandle | None, moved: int) -> None:
        """Put the first ``moved`` tokens of a load into the tree, and free the other rows."""
        cache, page = self._cache, self._cache.page_size
        rows = transfer.rows.reshape(-1, cache.row.width)
        kept = moved // page if handle is not None else 0
        if handle is not None and kept:
            before = np.zeros((transfer.start // page, cache.row.width), np.int32)
            end = transfer.start + kept * page
            all_rows = np.concatenate((before, rows[:kept]))
            private = cache.extend(handle, transfer.ids[:end], all_rows.ravel())
            cache.free(private)
            windows = rows[:kept, cache.row.num_full :]
            if cache.row.windows:
                cache.give_back(handle, windows[windows != 0], transfer.start // page)
        left = rows[kept:]
        cache.free(left[left != 0])

    def flush(self) -> None:
        """Take everything that transfers still read or write out of the tree. Nobody else may hold
        a part of it."""
        if not self._open:
            return
        pages = self._cache.drop_locked()
        for each in self._open.values():
            each.handle = None
        if len(pages):
            self._leaving.append((pages, set(self._open)))

    def _let_go(self, transfer_id: int) -> None:
        """Free what a flush took out, if no transfer may read it any more."""
        for pages, readers in self._leaving:
            readers.discard(transfer_id)
            if not readers:
                self._cache.free(pages)
        self._leaving = [entry for entry in self._leaving if entry[1]]

    def _add(self, transfer: Transfer, handle: PrefixHandle, then: Then) -> Transfer:
        self._open[transfer.id] = _Open(transfer, handle, then)
        self._observer.on(
            TransferStarted(
                transfer.id,
                transfer.direction,
                transfer.place,
                transfer.start,
                _num_tokens(transfer),
                int(np.count_nonzero(transfer.rows)),
            )
        )
        return transfer

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id


def _num_tokens(transfer: Transfer) -> int:
    return len(transfer.ids) - transfer.start
