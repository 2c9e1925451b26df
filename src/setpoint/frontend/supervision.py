"""The protocol through which an operator's instructions reach the code that starts engines.
``launch`` implements it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from setpoint.core.errors import RequestError


class Supervisor(Protocol):
    def retry(self, ranks: Collection[int]) -> None:
        """Reset the count of restarts, and start engines for those of these ranks that have
        none."""
        ...

    def scale_down(self, ranks: Collection[int]) -> None:
        """Take ranks out of service. Raises RequestError if no engine that takes requests would be
        left."""
        ...


class NoSupervisor:
    """The supervisor of a service whose engines are started by other code. It refuses every
    instruction."""

    def retry(self, ranks: Collection[int]) -> None:
        raise RequestError("This server cannot start or end engines: it did not start them itself.")

    def scale_down(self, ranks: Collection[int]) -> None:
        raise RequestError("This server cannot start or end engines: it did not start them itself.")
