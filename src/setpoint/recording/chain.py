"""Keyed hashes of the prefixes of a sequence, one for every place where a cached prefix may end.
They show how far two sequences are equal, and nothing else about them.

Works on packed ids. A *place* is a multiple of the page size, or the one length at which policies
compare waiting prompts.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from setpoint.core.request import Ids, pack_ids
from setpoint.recording.format import HASH_BYTES
from setpoint.scheduler.scheduler_config import SchedulerConfig

ID_BYTES = 4


@dataclass(slots=True, frozen=True)
class Places:
    """Where prefixes may end."""

    page_size: int
    also: int
    """A further place, the length at which policies compare waiting prompts; 0 = none."""

    @classmethod
    def of(cls, page_size: int, config: SchedulerConfig) -> Places:
        return cls(page_size, max(config.in_batch_deprioritize, 0))

    def after(self, position: int) -> int:
        """The first place after ``position``."""
        page = (position // self.page_size + 1) * self.page_size
        return self.also if position < self.also < page else page

    def ends(self, count: int) -> npt.NDArray[np.int64]:
        """The first ``count`` places."""
        pages = self.page_size * np.arange(1, count + 1)
        if self.also % self.page_size == 0:
            return pages
        return np.sort(np.append(pages, self.also))[:count]


class Chain:
    """The hashes of one sequence, which grows."""

    __slots__ = ("_hash", "_next", "_num_ids", "_places")

    def __init__(self, places: Places, key: bytes) -> None:
        self._hash = hashlib.blake2b(key=key, digest_size=HASH_BYTES)
        self._places = places
        self._num_ids = 0
        self._next = places.after(0)

    def extend(self, ids: bytes) -> bytes:
        """Append packed ids. Returns the hashes of the places that they reach, HASH_BYTES each."""
        hasher, reached = self._hash, []
        begin, end = 0, ID_BYTES * (self._next - self._num_ids)
        while end <= len(ids):
            hasher.update(ids[begin:end])
            reached.append(hasher.copy().digest())
            place, self._next = self._next, self._places.after(self._next)
            begin, end = end, end + ID_BYTES * (self._next - place)
        hasher.update(ids[begin:])
        self._num_ids += len(ids) // ID_BYTES
        return b"".join(reached)

    def skip(self, ids: Ids) -> None:
        """Append ids whose hashes are not needed."""
        self._hash.update(pack_ids(ids))
        self._num_ids += len(ids)
        self._next = self._places.after(self._num_ids)


def pseudonym(name: str, key: bytes) -> str:
    """The pseudonym of a name. Equal names have equal pseudonyms; the empty name stays empty."""
    return hashlib.blake2b(name.encode(), key=key, digest_size=8).hexdigest() if name else ""
