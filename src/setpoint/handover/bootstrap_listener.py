"""Runs a bootstrap server on a bound socket, on the event loop of the server that it belongs to."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn

from setpoint.handover.bootstrap_server import BootstrapServer

CLOSE_S = 1
"""How long its last answers may take."""


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the launcher."""
        yield


@asynccontextmanager
async def answering(server: BootstrapServer, sock: socket.socket) -> AsyncIterator[None]:
    """A context in which the routes are answered."""
    config = uvicorn.Config(
        server.app,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=CLOSE_S,
    )
    http = _Server(config)
    serving = asyncio.create_task(http.serve(sockets=[sock]))
    try:
        yield
    finally:
        http.should_exit = True
        await serving
