"""A bounded cache of compiled constraints."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

from setpoint.core.constraint import Constraint

T = TypeVar("T")

MAX_ENTRIES = 256
MAX_CHARS = 8 << 20
"""Most characters of all texts together; what is compiled takes a multiple of that."""


class CompiledCache(Generic[T]):
    """Keeps the constraints that were used last. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[Constraint, T] = OrderedDict()
        self._num_chars = 0

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
            self._num_chars += len(constraint.text)
            while len(self._entries) > MAX_ENTRIES or self._num_chars > MAX_CHARS:
                oldest, _ = self._entries.popitem(last=False)
                self._num_chars -= len(oldest.text)
