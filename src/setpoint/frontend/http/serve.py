"""Running uvicorn on a port that is bound already (``port``)."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import uvicorn
from fastapi import FastAPI

from setpoint.frontend.http.connection import Connection
from setpoint.frontend.http.port import cannot_listen

_BACKLOG = 2048


class Server(uvicorn.Server):
    """Leaves signals to the launcher: uvicorn would raise them again at its end, before the engine
    is shut down.

    Setting ``should_exit`` ends it: no new connections, and ``drain_s`` seconds for open requests,
    or until ``cut`` is called.
    """

    def __init__(self, config: uvicorn.Config, *, drain_s: float) -> None:
        super().__init__(config)
        self._drain_s = drain_s

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def cut(self) -> None:
        """Close every connection as it is; to their requests it looks as if the clients had
        left."""
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # uvicorn's own way to end the last requests is to cancel their tasks, which logs a
        # traceback for each.
        cutting = asyncio.get_running_loop().call_later(self._drain_s, self.cut)
        await super().shutdown(sockets)
        cutting.cancel()


def make_server(app: FastAPI, *, log_level: str = "info", drain_s: int = 5) -> Server:
    """A uvicorn server on uvloop and httptools, of an app that ``create_app`` has made; run it with
    ``await listen(server, bind_socket(…))``."""
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=partial(Connection, dialects=app.state.dialects),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=log_level,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=drain_s + 5,
    )
    logging.getLogger("uvicorn.error").addFilter(_is_news)
    return Server(config, drain_s=drain_s)


def _is_news(record: logging.LogRecord) -> bool:
    """The process id is of no use to who starts a server, and the launcher says when it is
    ready."""
    return not record.msg.startswith(("Started server process", "Finished server process"))


async def listen(server: uvicorn.Server, sock: socket.socket) -> None:
    """Serve on a bound socket. Raises ConfigError if another program has bound it too and was first
    to listen."""
    host, port = sock.getsockname()[:2]
    try:
        sock.listen(_BACKLOG)  # uvloop, which does the same, keeps the error to itself
    except OSError as error:
        raise cannot_listen(host, port, error) from error
    await server.serve(sockets=[sock])
