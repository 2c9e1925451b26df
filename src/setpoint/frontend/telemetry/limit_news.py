"""What a server tells of its limits: a line of the log when the one that binds changes, and the
metric ``setpoint:binding_limit``."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import msgspec

logger = logging.getLogger(__name__)

LOG_EVERY_S = 60.0
"""A line is written at most so often."""


@dataclass(slots=True, frozen=True)
class Diagnosis:
    """What a doctor says about some minutes of an engine."""

    limit: str
    """The cause that it names, or its word for a server without one."""
    binds: bool
    """Whether that is a limit of the server, so that an operator should know of it."""
    sentence: str
    """The limit, the number that proves it, and what to change."""
    report: dict[str, Any]
    """Everything, as JSON has it."""


class LimitNews:
    def __init__(self) -> None:
        self.binding: dict[str, int] = {}
        """Limits that have bound -> 1 for the one that binds now."""
        self._latest: Diagnosis | None = None
        self._logged: str | None = None
        """The limit that the log named last, unless it said that it is gone."""
        self._logged_at = float("-inf")

    @property
    def report(self) -> bytes | None:
        """The latest one as JSON."""
        return None if self._latest is None else msgspec.json.encode(self._latest.report)

    def take(self, found: Diagnosis, now: float) -> None:
        """Take a diagnosis that was made at ``now``, in seconds of any clock."""
        before, self._latest = self._latest, found
        self.rest()
        if found.binds:
            self.binding[found.limit] = 1
        # Twice in a row, because at the border of two limits the diagnosis goes to and fro.
        if before is not None and before.limit == found.limit:
            self._log(found, now)

    def rest(self) -> None:
        """There are no requests, so nothing binds."""
        self.binding = dict.fromkeys(self.binding, 0)

    def _log(self, found: Diagnosis, now: float) -> None:
        limit = found.limit if found.binds else None
        if limit == self._logged or now - self._logged_at < LOG_EVERY_S:
            return
        if limit is None:
            logger.info("Doctor: %s no longer limits the server. %s", self._logged, found.sentence)
        else:
            logger.info("Doctor: %s limits the server. %s", limit, found.sentence)
        self._logged, self._logged_at = limit, now
