"""What a decode server needs: the prefill servers that it knows, and, without a router, somebody
who has one of them compute the same requests (docs/decisions/0075-pairs-without-a-router.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from setpoint.core.request import Request

T = TypeVar("T")


class KnownServers(Protocol):
    """The prefill servers whose keys and values a decode server takes. A request can name one of
    them, and add none (docs/decisions/0084-who-is-trusted.md)."""

    def known(self, host: str, port: int) -> tuple[str, int]:
        """Where the bootstrap server is that a request means by this host and port. Raises
        RequestError if it is of no prefill server that is known."""
        ...


class Paired(Protocol):
    """The requests of a body, and the prefill server that will compute their prompts."""

    @property
    def body(self) -> dict[str, Any]:
        """The client's body with the fields of a bootstrap room."""
        ...

    def noting(self, started: Callable[[T], object]) -> Callable[[T], None]:
        """``started``, followed by sending the body to the prefill server."""
        ...

    def recording(self, finished: Callable[[T], object]) -> Callable[[T], None]:
        """``finished``, which is called for each request that ends. After the last one the prefill
        server is told, if it has not answered, that nobody waits any more."""
        ...


class Pairing(Protocol):
    num_alone: int
    """Bodies that this server computed alone because no prefill server answered."""

    def up(self) -> Mapping[str, bool]:
        """Each prefill server's URL -> whether it takes prompts now."""
        ...

    def pair(
        self, path: str, requests: Sequence[Request], received: Mapping[str, Any]
    ) -> Paired | None:
        """A prefill server for the requests of the body ``received``, which came at this path.
        None: this server computes them alone."""
        ...
