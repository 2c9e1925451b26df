"""Finds a ``custom_id`` that stands twice in a file of any length, with 8 bytes of memory per id.

Ids are first only hashed; equal hashes name the few suspects, which a second pass compares in full,
so the answer is exact.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from setpoint.batch.entry import BatchError

_MAX_SUSPECTS = 1000
"""Hashes that the second pass looks at: it only has to find examples."""
_MAX_SHOWN = 3
_MASK = (1 << 64) - 1


class Duplicates:
    def __init__(self) -> None:
        self._hashes = array("Q")

    def add(self, custom_id: str | None) -> None:
        """None: there is no id, and nothing to compare."""
        if custom_id is not None:
            self._hashes.append(hash(custom_id) & _MASK)

    def check(self, again: Iterable[tuple[int, str | None]], *, what: str) -> None:
        """Raise BatchError for an id that was added twice; ``again`` gives the same ids with their
        numbers once more.

        what: what the numbers count, e.g. "lines". Forgets the hashes.
        """
        hashes = np.frombuffer(self._hashes, np.uint64)
        hashes.sort()  # in place: no second copy
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
