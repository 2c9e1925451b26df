"""A store in the memory of this process: the host tier."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from setpoint.tiers.store import Bytes, StoreCounts


class MemoryStore:
    """Keeps at most ``max_bytes``; the least recently used blocks go first."""

    def __init__(self, max_bytes: int) -> None:
        self.counts = StoreCounts()
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._blocks: OrderedDict[bytes, Bytes] = OrderedDict()
        self._num_bytes = 0

    def sweep(self) -> None:
        """There is nothing to do."""

    def num_leading(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            return next(
                (index for index, key in enumerate(keys) if key not in self._blocks), len(keys)
            )

    def get(self, key: bytes) -> Bytes | None:
        with self._lock:
            found = self._blocks.get(key)
            if found is not None:
                self._blocks.move_to_end(key)
            return found

    def put(self, key: bytes, data: Bytes) -> int:
        with self._lock:
            if key in self._blocks:
                self._blocks.move_to_end(key)
                return 0
            if len(data) > self._max_bytes:
                self.counts.refused += 1
                return 0
            while self._num_bytes + len(data) > self._max_bytes:
                _, gone = self._blocks.popitem(last=False)
                self._num_bytes -= len(gone)
                self.counts.evicted += 1
            self._blocks[key] = data.copy()
            self._num_bytes += len(data)
            return len(data)

    def clear(self) -> int:
        with self._lock:
            num_blocks = len(self._blocks)
            self._blocks.clear()
            self._num_bytes = 0
            return num_blocks

    def size(self) -> tuple[int, int]:
        with self._lock:
            return len(self._blocks), self._num_bytes

    def close(self) -> None:
        self.clear()
