"""The protocol of who starts engines, as far as an operator may tell it what to do. ``launch`` is
it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from setpoint.core.errors import RequestError


class Supervisor(Protocol):
    @property
    def max_restarts(self) -> int:
        """How many engines that have died may be started again within an hour."""
        ...

    @property
    def restarts_left(self) -> int:
        """How many of them are left."""
        ...

    def retry(self, ranks: Collection[int]) -> None:
        """Give all restarts back, and start engines again for those of these ranks that have
        none."""
        ...

    def scale_down(self, ranks: Collection[int]) -> None:
        """Take ranks out of service. Raises RequestError if no engine would be left that takes
        requests."""
        ...


class NoSupervisor:
    """The supervisor of a service whose engines are started by somebody else: it can do nothing
    for them."""

    max_restarts = restarts_left = 0

    def retry(self, ranks: Collection[int]) -> None:
        raise RequestError("This server does not start its engines itself.")

    def scale_down(self, ranks: Collection[int]) -> None:
        raise RequestError("This server does not start its engines itself.")
