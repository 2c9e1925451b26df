"""Moves pages between a pool and stores, in threads of its own. Implements ``core.transfers.Mover``
for one rank.

A block of a store holds whole page rows of ``block`` tokens and, in front, one bit per page that
says whether the row had it: windows give pages back. Two threads work: one looks up and loads, for
which requests wait, the other one saves.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

import numpy as np

from setpoint.core.messages import PagesMoved, PrefixFound
from setpoint.core.request import Ids
from setpoint.core.transfers import Transfer
from setpoint.tiers.block_keys import block_keys
from setpoint.tiers.store import Bytes, Store, StoreCounts, StoreError

logger = logging.getLogger(__name__)

Post = Callable[[PrefixFound | PagesMoved], object]
Job = Callable[[], object]
Result = TypeVar("Result")
MAX_ERRORS = 3
"""After so many errors in a row a store is not used any more."""


class PoolRows(Protocol):
    """The page rows of a pool as bytes (``engine.runner.page_rows``)."""

    width: int
    row_bytes: int

    def read(self, rows: Ids) -> Bytes: ...

    def write(self, rows: Ids, data: Bytes, *, first: int = 0) -> None: ...


def block_bytes(rows: PoolRows, block: int, page_size: int) -> int:
    """Bytes of a block of so many tokens: a bit for each page row, and the rows."""
    num_rows = block // page_size
    return -(-num_rows * rows.width // 8) + num_rows * rows.row_bytes


class Tier:
    """A store in use, and what is known about it."""

    def __init__(self, name: str, store: Store, place: str = "") -> None:
        """place: where the blocks are, for people; without passwords."""
        self.name, self.store, self.place = name, store, place
        self.off = ""
        """Why it is not used any more; empty if it is."""
        self.loaded_tokens = self.saved_tokens = self.missed_tokens = 0
        self.loaded_bytes = self.saved_bytes = 0
        self.load_s = self.save_s = 0.0
        self.num_clearings = 0
        """Orders to clear that have not been carried out yet."""
        self.clear_error = ""
        """Why the last such order failed; empty if it did not."""
        self._num_errors = 0
        self._last_error = ""

    def try_(self, act: Callable[[Store], Result], *, proves: bool = True) -> Result | None:
        """What ``act`` returns; None if the store raises, or is off. proves: whether a success says
        that the store answers again. The size of a store of another process is counted here."""
        if self.off:
            return None
        try:
            found = act(self.store)
        except Exception as error:  # a store of the user's own may raise anything
            self._num_errors += 1
            self._last_error = str(error)
            expected = isinstance(error, StoreError)
            logger.warning("Cache tier %s: %s", self.name, error, exc_info=not expected)
            if self._num_errors >= MAX_ERRORS:
                self.switch_off(f"{self._num_errors} errors in a row, the last one: {error}")
            return None
        if proves:
            self._num_errors = 0
        return found

    def clear(self) -> None:
        """Remove this engine's blocks from the store."""
        is_done = self.try_(lambda store: (store.clear(), True)[1])
        self.clear_error = "" if is_done else self.off or self._last_error
        self.num_clearings -= 1

    def switch_off(self, why: str) -> None:
        self.off = why
        logger.error("Cache tier %s is off: %s", self.name, why)


class Worker(Protocol):
    """Does jobs, one after the other, in the order in which they came."""

    def add(self, job: Job) -> None: ...


class WorkerThread:
    """A worker that is a thread, which ends with the process."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def add(self, job: Job) -> None:
        self._jobs.put(job)

    def _work(self) -> None:
        while True:
            self._jobs.get()()


class StoreMover:
    """See the module. post: puts a message into the loop's inbox, from any thread."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        rows: Callable[[], PoolRows],
        *,
        block: int,
        page_size: int,
        post: Post,
        worker: Callable[[str], Worker] = WorkerThread,
    ) -> None:
        """tiers: the fastest first. rows: gives the rows of the pool's present memory. worker:
        makes a worker with this name."""
        self.tiers = list(tiers)
        self.identity = b""
        """The digest of the engine; set by ``serve_as``, until which nothing is found or kept."""
        self._rows, self._block, self._page = rows, block, page_size
        self._post = post
        self._loads, self._saves = worker("cache-load"), worker("cache-save")
        self._lock = threading.Lock()
        """Guards the next two."""
        self._open: set[int] = set()
        """Transfers that have not ended."""
        self._cancelled: set[int] = set()
        for tier in self.tiers:
            self._loads.add(partial(self._sweep, tier))

    def serve_as(self, identity: bytes) -> None:
        """Read and write blocks of this engine from now on."""
        self.identity = identity

    @property
    def counts(self) -> StoreCounts:
        """The sums over all tiers."""
        return StoreCounts(
            *(
                sum(getattr(tier.store.counts, name) for tier in self.tiers)
                for name in ("damaged", "evicted", "refused")
            )
        )

    # ------------------------------------------------------------------ from the loop

    def look_up(self, seq_id: int, digests: bytes) -> None:
        self._loads.add(lambda: self._look_up(seq_id, digests, self.identity))

    def load(self, transfer: Transfer) -> None:
        rows, identity = self._begin(transfer), self.identity
        self._loads.add(lambda: self._load(transfer, rows, identity))

    def save(self, transfer: Transfer) -> None:
        rows, identity = self._begin(transfer), self.identity
        self._saves.add(lambda: self._save(transfer, rows, identity))

    def _begin(self, transfer: Transfer) -> PoolRows:
        with self._lock:
            self._open.add(transfer.id)
        return self._rows()

    def cancel(self, transfer_id: int) -> None:
        with self._lock:
            if transfer_id in self._open:  # its end may be on its way to the loop
                self._cancelled.add(transfer_id)

    def attach(self, tier: Tier) -> None:
        """Use a further store, the slowest of all."""
        self.tiers = [*self.tiers, tier]
        self._loads.add(partial(self._sweep, tier))

    def detach(self, tier: Tier) -> None:
        """Stop using a store, and close it when what works on it has ended."""
        self.tiers = [each for each in self.tiers if each is not tier]
        tier.off = "it was detached"
        self._loads.add(lambda: self._saves.add(partial(_close, tier)))

    def clear(self, tier: Tier) -> None:
        """Remove this engine's blocks from a store, before any later lookup. The tier says when
        that is done, and how it ended."""
        tier.num_clearings += 1
        self._loads.add(tier.clear)

    def _sweep(self, tier: Tier) -> None:
        tier.try_(lambda store: store.sweep())

    # ------------------------------------------------------------------ in workers

    def _look_up(self, seq_id: int, digests: bytes, identity: bytes) -> None:
        began = time.perf_counter()
        found = 0
        if identity:
            keys = block_keys(identity, digests)
            for tier in self.tiers:
                rest = keys[found:]
                if rest:
                    more = tier.try_(lambda store: store.num_leading(rest))  # noqa: B023
                    found += more if isinstance(more, int) else 0
        self._post(PrefixFound(seq_id, found * self._block, time.perf_counter() - began))

    def _load(self, transfer: Transfer, rows: PoolRows, identity: bytes) -> None:
        began = time.perf_counter()
        moved = num_bytes = from_host = 0
        why = ""
        try:
            block, first = self._block, transfer.start // self._block
            keys = block_keys(identity, transfer.digests)
            for index in range(first, len(keys)):
                if transfer.id in self._cancelled:
                    why = "cancelled"
                    break
                data, tier = self._get(keys[index])
                if data is None or tier is None or not self._fill(transfer, rows, index, data):
                    why = "a block is missing"
                    break
                end = (index + 1) * block - transfer.start
                from_host += end - moved if tier.name == "host" else 0
                tier.loaded_tokens += end - moved
                tier.loaded_bytes += len(data)
                num_bytes += len(data)
                moved = end
        except Exception:
            logger.exception("Loading cached blocks failed.")
            why = "an error"
        seconds = time.perf_counter() - began
        self._end(PagesMoved(transfer.id, moved, num_bytes, seconds, why, from_host))

    def _get(self, key: bytes) -> tuple[Bytes | None, Tier | None]:
        """The block, and the tier that had it; the tiers before it get a copy."""
        tiers = self.tiers  # another list after the loop has attached or detached one
        for number, tier in enumerate(tiers):
            began = time.perf_counter()
            data = tier.try_(lambda store: store.get(key))
            tier.load_s += time.perf_counter() - began
            if isinstance(data, np.ndarray):
                for faster in tiers[:number]:
                    faster.try_(lambda store: store.put(key, data))  # noqa: B023
                return data, tier
        return None, None

    def _fill(self, transfer: Transfer, rows: PoolRows, index: int, data: Bytes) -> bool:
        """Fill the transfer's rows of a block. False if the block lacks a page that they need."""
        num_rows = self._block // self._page
        num_bits = -(-num_rows * rows.width // 8)
        if len(data) != block_bytes(rows, self._block, self._page):
            return False
        skipped = max(transfer.start - index * self._block, 0) // self._page
        at = (index * self._block - transfer.start) // self._page + skipped
        table = transfer.rows.reshape(-1, rows.width)[at : at + num_rows - skipped]
        bits = np.unpackbits(data[:num_bits], count=num_rows * rows.width)
        has = bits.reshape(num_rows, rows.width)[skipped:].astype(bool)
        if (table.astype(bool) & ~has).any():
            return False
        rows.write(table.ravel(), data[num_bits:], first=skipped)
        return True

    def _save(self, transfer: Transfer, rows: PoolRows, identity: bytes) -> None:
        began = time.perf_counter()
        moved = num_bytes = 0
        why = ""
        try:
            block, first = self._block, -(-transfer.start // self._block)
            keys = block_keys(identity, transfer.digests)[: len(transfer.ids) // block]
            table = transfer.rows.reshape(-1, rows.width)
            for index in range(first, len(keys)):
                if transfer.id in self._cancelled or not identity:
                    why = "cancelled"
                    break
                at = (index * block - transfer.start) // self._page
                num_new, is_kept = self._put(
                    keys[index], rows, table[at : at + block // self._page]
                )
                num_bytes += num_new
                if not is_kept:  # nobody could use the blocks after it
                    why = self._why_not_kept()
                    break
                moved = (index + 1) * block - transfer.start
            else:
                moved = len(transfer.ids) - transfer.start
        except Exception:
            logger.exception("Saving cached blocks failed.")
            why = "an error"
        seconds = time.perf_counter() - began
        self._end(PagesMoved(transfer.id, moved, num_bytes, seconds, why))

    def _put(self, key: bytes, rows: PoolRows, table: Ids) -> tuple[int, bool]:
        """Put a block into every tier that lacks it. Returns the number of bytes written, and
        whether any tier has the block now."""
        data: Bytes | None = None
        num_bytes, is_kept = 0, False
        for tier in self.tiers:
            began = time.perf_counter()
            present = tier.try_(lambda store: store.num_leading([key]))
            if present == 0:
                if data is None:
                    bits = np.packbits(table.ravel() != 0)
                    data = np.concatenate((bits, rows.read(table.ravel())))
                written = tier.try_(lambda store: store.put(key, data))  # noqa: B023
                if isinstance(written, int) and written:
                    present, num_bytes = 1, num_bytes + written
                    tier.saved_bytes += written
                    tier.saved_tokens += self._block
                else:  # it was refused, or another server was faster
                    present = tier.try_(lambda store: store.num_leading([key]))
            is_kept = is_kept or present == 1
            tier.save_s += time.perf_counter() - began
        return num_bytes, is_kept

    def _why_not_kept(self) -> str:
        if not self.tiers:
            return "no storage in use"
        if all(tier.off for tier in self.tiers):
            return "the tiers are off"
        return "refused or failed"

    def _end(self, message: PagesMoved) -> None:
        with self._lock:
            self._open.discard(message.id)
            self._cancelled.discard(message.id)
        self._post(message)


def _close(tier: Tier) -> None:
    try:
        tier.store.close()
    except Exception as error:  # a store of the user's own may raise anything
        logger.warning("Cache tier %s cannot be closed: %s", tier.place or tier.name, error)
