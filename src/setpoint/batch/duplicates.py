"""Finds a ``custom_id`` that occurs twice in a file of any length, with 8 bytes of memory per id.

The first pass only hashes ids. Ids with equal hashes are the few suspects, which a second pass
compares in full, so the answer is exact.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from setpoint.batch.entry import BatchError

_MAX_SUSPECTS = 1000
"""Most hashes that the second pass examines: it only has to find examples."""
_MAX_SHOWN = 3
_MASK = (1 << 64) - 1


class Duplicates:
    def __init__(self) -> None:
        self._hashes = array("Q")

    def add(self, custom_id: str | None) -> None:
        """Add an id. None means that the request has no id, so there is nothing to compare."""
        if custom_id is not None:
            self._hashes.append(hash(custom_id) & _MASK)

    def check(self, again: Iterable[tuple[int, str | None]], *, what: str) -> None:
        """Raise BatchError if an id was added twice. ``again`` yields (number, id) for the same ids
        once more.

        what: what the numbers count, e.g. "lines". The hashes are dropped afterwards.
        """
        hashes = np.frombuffer(self._hashes, np.uint64)
        hashes.sort()  # in place, to avoid a second copy
        suspects = set(np.unique(hashes[1:][hashes[1:] == hashes[:-1]])[:_MAX_SUSPECTS].tolist())
        del hashes
        self._hashes = array("Q")
        if not suspects:
            return
        first: dict[str, int] = {}
        found: list[str] = []
        for number, custom_id in again:
            if custom_id is None or hash(custom_id) & _MASK not in suspects:
                continue
            if custom_id in first:
                found.append(f"{custom_id!r} on {what} {first[custom_id]} and {number}")
                if len(found) == _MAX_SHOWN:
                    break
            first.setdefault(custom_id, number)
        if found:
            raise BatchError(
                f"custom_id must be unique in a batch: {'; '.join(found)}. Nothing was computed."
            )
