"""Bounds how many connections of a port are open, so that those who connect and ask nothing keep
nobody out, and leave descriptors for the rest of the server."""

from __future__ import annotations

import logging
import resource
import time
from typing import Protocol

logger = logging.getLogger(__name__)

RESERVED = 512
"""Descriptors that are kept for everything but clients, if there are so many."""
LARGEST = 1 << 16
LOG_INTERVAL_S = 1.0


class Member(Protocol):
    @property
    def can_end(self) -> bool:
        """Whether no request has arrived that waits for its answer."""
        ...

    def cut(self) -> None:
        """Close the connection at once."""


def most_for_clients() -> int:
    """How many connections this process can have open beside its own files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return LARGEST
    return min(max(soft - RESERVED, soft // 2), LARGEST)


class Crowd:
    """The open connections of a port. For one more than ``most`` the oldest ends that waits for no
    answer; if all of them wait, the new one does."""

    def __init__(self, most: int, where: str) -> None:
        """where: the port, for the log."""
        self._most = most
        self._where = where
        self._open: dict[Member, None] = {}
        """The open connections in order of arrival."""
        self._num_cut = 0
        self._logged_at = float("-inf")

    def enter(self, member: Member) -> None:
        self._open[member] = None
        if len(self._open) > self._most:
            oldest = next((each for each in self._open if each.can_end), member)
            del self._open[oldest]
            oldest.cut()
            self._note()

    def leave(self, member: Member) -> None:
        self._open.pop(member, None)

    def _note(self) -> None:
        self._num_cut += 1
        now = time.monotonic()
        if now - self._logged_at >= LOG_INTERVAL_S:
            self._logged_at = now
            logger.warning(
                "More than %d connections are open at %s: the oldest without a request ends (%d so"
                " far).",
                *(self._most, self._where, self._num_cut),
            )
