"""Runs uvicorn on a port that is already bound (``port``)."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Iterator, Set
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.types import ASGIApp

from setpoint.frontend.drain import Drain
from setpoint.frontend.http.connection import Connection, Errors
from setpoint.frontend.http.crowd import Crowd, most_for_clients
from setpoint.frontend.http.listener import Listener
from setpoint.frontend.http.pace import TurnLimiter
from setpoint.frontend.http.port import cannot_listen
from setpoint.frontend.refusal import Refusal
from setpoint.frontend.unread import Unread

if TYPE_CHECKING:
    from starlette.applications import Starlette

logger = logging.getLogger(__name__)

FEW_CONNECTIONS = 256
MAIN = "the port"


class Server(uvicorn.Server):
    """A uvicorn server that leaves signals to the launcher: uvicorn would raise them again at its
    end, before the engine is shut down. Of a process with several, the one at the main port logs
    that it ends.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        errors: Errors,
        drain: Drain,
        unread: Unread,
        *,
        urgent: Set[str] = frozenset(),
        most: int | None = None,
        where: str = MAIN,
    ) -> None:
        """unread: notes the answers that clients do not read. urgent: see ``TurnLimiter``. most:
        how many connections may be open; None: as many as the process can have. where: the port,
        for the log."""
        super().__init__(config)
        logging.getLogger("uvicorn.error").addFilter(_is_news)
        self._errors = errors
        self._drain = drain
        self._unread = unread
        self._urgent = urgent
        self._crowd = Crowd(most_for_clients() if most is None else most, where)
        self._logs_end = where == MAIN
        self._close_s = 0.0
        self.listening = asyncio.Event()
        """Set once connections are accepted."""

    def end(self, close_s: float) -> None:
        """Accept no new connections, and end when the open ones have got their answers: they have
        ``close_s`` seconds for that, or until ``cut`` is called."""
        self._close_s = close_s
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen. Raises ConfigError if another program has bound the same address and
        listened first."""
        await super().startup(sockets=[])
        pace = TurnLimiter(urgent=self._urgent)
        make = partial(
            Connection,
            errors=self._errors,
            pace=pace,
            drain=self._drain,
            crowd=self._crowd,
            unread=self._unread,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        for sock in sockets or []:
            host, port = sock.getsockname()[:2]
            try:
                self.servers.append(Listener(sock, make, pace))  # type: ignore[arg-type]
            except OSError as error:
                raise cannot_listen(host, port, error) from error
        self.listening.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def cut(self) -> None:
        """Close every connection at once; to the requests it looks as if their clients had left."""
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._logs_end:
            logger.info("Shutting down")
        # uvicorn ends the last requests by cancelling their tasks, which logs a traceback for
        # each. That is needed only for requests that wait for a thread.
        self.config.timeout_graceful_shutdown = math.ceil(self._close_s) + 1
        cutting = asyncio.get_running_loop().call_later(self._close_s, self.cut)
        await super().shutdown(sockets)
        cutting.cancel()


def make_server(app: Starlette, *, log_level: str = "info") -> Server:
    """A uvicorn server on uvloop and httptools for an app made by ``create_app``; run it with
    ``await server.serve(sockets=[bind_socket(…)])``."""
    config = uvicorn.Config(
        app,
        loop="uvloop",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=log_level,
    )
    dialects = app.state.dialects
    return Server(config, dialects, app.state.drain, app.state.unread, urgent=dialects.controls)


class PlainErrors:
    """Errors of a port that speaks no client's API."""

    def error_body(self, path: str, refusal: Refusal) -> Any:
        return {"error": {"message": refusal.message, "code": refusal.status_code}}


def small_server(app: ASGIApp, *, where: str) -> Server:
    """A server of few routes: the same connections, with room for fewer of them. where: its
    port, for the log."""
    config = uvicorn.Config(
        app, ws="none", lifespan="off", log_config=None, log_level="warning", access_log=False
    )
    unread = Unread(where)
    return Server(config, PlainErrors(), Drain(), unread, most=FEW_CONNECTIONS, where=where)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether to log a line of uvicorn's: its process id is of no use to users, the launcher
    reports when the server is ready, and ``Server`` that it ends."""
    return not record.msg.startswith(
        ("Started server process", "Finished server process", "Shutting down")
    )
