"""Answers that wait because their clients do not read them, and those that were given up."""

from __future__ import annotations

from collections.abc import Callable


class Unread:
    """Written by the connections."""

    def __init__(self) -> None:
        self.waiting: dict[object, Callable[[], int]] = {}
        """Connection -> how many bytes of its answer wait in this process."""
        self.num_closed = 0
        """Connections closed because their clients had not read for too long."""

    @property
    def num_bytes(self) -> int:
        return sum(size() for size in self.waiting.values())
