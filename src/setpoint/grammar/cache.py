"""A bounded cache of compiled constraints."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from setpoint.core.constraint import Constraint

T = TypeVar("T")

MAX_ENTRIES = 256


class CompiledCache(Generic[T]):
    """Keeps the constraints that were used last. Safe to use from several threads."""

    def __init__(
        self,
        size_of: Callable[[Constraint, T], int],
        *,
        max_size: int,
        max_entries: int = MAX_ENTRIES,
    ) -> None:
        """size_of: how much an entry counts towards ``max_size``; always the same for an entry."""
        self._lock = threading.Lock()
        self._entries: OrderedDict[Constraint, T] = OrderedDict()
        self._size_of = size_of
        self._max_size = max_size
        self._max_entries = max_entries
        self._size = 0

    def __contains__(self, constraint: Constraint) -> bool:
        return constraint in self._entries

    def get(self, constraint: Constraint) -> T | None:
        with self._lock:
            found = self._entries.get(constraint)
            if found is not None:
                self._entries.move_to_end(constraint)
            return found

    def put(self, constraint: Constraint, compiled: T) -> None:
        with self._lock:
            if constraint in self._entries:
                return
            self._entries[constraint] = compiled
            self._size += self._size_of(constraint, compiled)
            while len(self._entries) > self._max_entries or self._size > self._max_size:
                self._drop_oldest()

    def drop(self, constraint: Constraint) -> None:
        """Forget a constraint, if it is here."""
        with self._lock:
            if (compiled := self._entries.pop(constraint, None)) is not None:
                self._size -= self._size_of(constraint, compiled)

    def drop_oldest(self) -> bool:
        """Forget the constraint that has not been used for longest; False if there is none."""
        with self._lock:
            return bool(self._entries) and self._drop_oldest()

    def _drop_oldest(self) -> bool:
        self._size -= self._size_of(*self._entries.popitem(last=False))
        return True
