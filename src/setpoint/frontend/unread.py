"""Answers that wait because their clients do not read them, and those that were given up."""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Unread:
    """Written by the connections of a port."""

    def __init__(self, where: str) -> None:
        """where: the port, for the log."""
        self._where = where
        self.waiting: dict[object, Callable[[], int]] = {}
        """Connection -> how many bytes of its answer wait in this process."""
        self.num_closed = 0
        """Connections closed because their clients had not read for too long."""

    def close(self, connection: object, unread_s: float) -> None:
        """Note that a connection is closed because its client has read nothing for so long."""
        self.waiting.pop(connection, None)
        self.num_closed += 1
        logger.info(
            "%s: closed a connection whose client had not read its answer for %g s.",
            self._where,
            unread_s,
        )

    @property
    def num_bytes(self) -> int:
        return sum(size() for size in self.waiting.values())
