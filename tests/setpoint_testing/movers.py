"""Moves pages of a scripted executor when a test says so, without threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from setpoint.core.messages import PagesMoved, PrefixFound
from setpoint.core.prefix_digest import split
from setpoint.core.transfers import Direction, Transfer
from setpoint_testing.scripted import ScriptedExecutor

Key = bytes


@dataclass(eq=False)
class ScriptedMover:
    """Implements core.transfers.Mover over a dictionary. Work is done at once, or, with ``hold``, when
    ``finish_next`` is called."""

    executor: ScriptedExecutor
    block: int
    page_size: int
    width: int
    hold: bool = False
    stored: dict[Key, np.ndarray] = field(default_factory=dict)
    """Digest of a block -> what its pages held, by row and column; -1 where
    there was no page."""
    waiting: list[Callable[[], PrefixFound | PagesMoved]] = field(default_factory=list)
    post: Callable[[PrefixFound | PagesMoved], object] = print
    """Puts a message into the loop's inbox; set by the harness."""
    cancelled: set[int] = field(default_factory=set)
    seconds: float = 0.001
    """How long each piece of work says that it took."""
    spoil: Callable[[int], int] = lambda num_tokens: num_tokens
    """How much of a load arrives, given how much was asked for; what is behind is garbage."""

    def look_up(self, seq_id: int, digests: bytes) -> None:
        self._do(lambda: PrefixFound(seq_id, self._num_leading(digests), self.seconds))

    def load(self, transfer: Transfer) -> None:
        assert transfer.direction is Direction.LOAD
        self._do(lambda: self._load(transfer))

    def save(self, transfer: Transfer) -> None:
        assert transfer.direction is Direction.SAVE
        self._do(lambda: self._save(transfer))

    def cancel(self, transfer_id: int) -> None:
        self.cancelled.add(transfer_id)

    def finish_next(self, index: int = 0) -> None:
        """Do one piece of the waiting work."""
        self.post(self.waiting.pop(index)())

    def _do(self, work: Callable[[], PrefixFound | PagesMoved]) -> None:
        self.waiting.append(work)
        if not self.hold:
            self.finish_next()

    def _num_leading(self, digests: bytes) -> int:
        known = takewhile(self.stored.__contains__, split(digests))
        return self.block * sum(1 for _ in known)

    def _rows(self, transfer: Transfer) -> np.ndarray:
        return transfer.rows.reshape(-1, self.width)

    def _load(self, transfer: Transfer) -> PagesMoved:
        page, store = self.page_size, self.executor.store
        wanted = len(transfer.ids) - transfer.start
        arrives = 0 if transfer.id in self.cancelled else self.spoil(wanted)
        rows, moved = self._rows(transfer), 0
        for number, row in enumerate(rows):
            position = transfer.start + number * page
            end = position // self.block * self.block + self.block
            data = self.stored.get(_key(transfer, end // self.block))
            whole = data is not None and position + page - transfer.start <= arrives
            content = None if data is None else data[(position - end + self.block) // page]
            if content is not None and ((row != 0) & (content[:, 0] == ABSENT)).any():
                whole = False
            for column, number_of_page in enumerate(row):
                if number_of_page:
                    where = slice(number_of_page * page, (number_of_page + 1) * page)
                    store[where] = content[column] if whole else GARBAGE
            if not whole:
                break
            moved = position + page - transfer.start
        why = "" if moved == wanted else "cancelled" if not arrives else "a block is missing"
        moved = (transfer.start + moved) // self.block * self.block - transfer.start
        return PagesMoved(transfer.id, max(moved, 0), 8 * moved, self.seconds, why)

    def _save(self, transfer: Transfer) -> PagesMoved:
        page, store = self.page_size, self.executor.store
        rows = self._rows(transfer)
        content = np.full((len(rows), self.width, page), ABSENT, np.int64)
        for number, row in enumerate(rows):
            for column, number_of_page in enumerate(row):
                if number_of_page:
                    where = slice(number_of_page * page, (number_of_page + 1) * page)
                    content[number, column] = store[where]
        first = -(-transfer.start // self.block) * self.block
        for begin in range(first, len(transfer.ids) - self.block + 1, self.block):
            at = (begin - transfer.start) // page
            key = _key(transfer, begin // self.block + 1)
            self.stored.setdefault(key, content[at : at + self.block // page])
        return PagesMoved(transfer.id, len(transfer.ids) - transfer.start, 8, self.seconds)


ABSENT, GARBAGE = -7, -9
"""What the store of a block, or of the pool, holds instead of tokens."""


def _key(transfer: Transfer, end: int) -> Key:
    """The digest of the last of so many blocks."""
    return split(transfer.digests)[end - 1]
