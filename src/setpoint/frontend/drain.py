"""A server that drains: it has been asked to end, finishes the requests that it has and takes no
others, while its port stays open for probes, and for answers that tell clients to go elsewhere."""

from __future__ import annotations

from setpoint.core.errors import RequestError
from setpoint.frontend.refusal import RETRY_AFTER_S
from setpoint.ipc.client import EngineClient

WORD = "draining"
"""The body of the answers to probes."""
REFUSED = "The server is shutting down and takes no new requests (draining). Try again."
UNAVAILABLE = "ServiceUnavailableError"
CUT = "The server is shutting down."


def without_weights(engine: EngineClient) -> str:
    """What is said to requests while released weights cannot be restored."""
    return f"The model has no weights: {engine.orders.why_no_weights}"


class Drain:
    def __init__(self) -> None:
        self.is_on = False

    def begin(self) -> None:
        self.is_on = True

    def cut(self, engine: EngineClient) -> None:
        """Abort the requests that are open."""
        engine.abort(abort_all=True, message=CUT, err_type=UNAVAILABLE)

    def check(self) -> None:
        """Raise RequestError (503) for a new request if the server drains."""
        if self.is_on:
            raise RequestError(
                REFUSED,
                status_code=503,
                retry_after_s=RETRY_AFTER_S,
            )
