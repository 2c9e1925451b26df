"""How long reading may take: logs may be made to keep their reader busy."""

from __future__ import annotations

import time

GRACE_S = 10.0
"""Seconds of CPU time that any log may take."""
LEAST_RATE = 2e6
"""Beyond that, a log is read only as long as so many bytes take at most a second of CPU time. A
server's log is read twenty times as fast; some files are made to be slow."""


class Budget:
    """The CPU time for reading one log, or all logs of a folder together."""

    def __init__(self) -> None:
        self._began = time.thread_time()
        self._size = 0

    def read(self, size: int) -> None:
        """Record that so many bytes were read."""
        self._size += size

    @property
    def is_spent(self) -> bool:
        return time.thread_time() - self._began > GRACE_S + self._size / LEAST_RATE
