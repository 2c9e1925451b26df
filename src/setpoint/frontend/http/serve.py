"""Binding the port and running uvicorn. The port is bound before the model loads, so that a taken one is known at once."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from setpoint.core.errors import ConfigError

_BACKLOG = 2048


def bind_socket(host: str, port: int) -> socket.socket:
    """A TCP socket bound to the address, not listening yet. Raises ConfigError with advice if it cannot be had."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror or error}; give an address of this machine, e.g. 127.0.0.1.") from error
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _cannot_listen(host, port, error) from error
    return sock


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        advice = "stop the program that uses it, or choose another with --port"
    elif error.errno == errno.EACCES:
        advice = "ports below 1024 need privileges; choose another with --port"
    else:
        advice = "check --host and --port"
    return ConfigError(f"Cannot listen on {host}:{port}: {error.strerror}; {advice}.")


class _Server(uvicorn.Server):
    """Leaves signals to the launcher: uvicorn would raise them again at its end, before the engine is shut down."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: FastAPI, *, log_level: str = "info", drain_s: int = 5) -> uvicorn.Server:
    """A uvicorn server on uvloop and httptools; run it with ``await listen(server, bind_socket(…))``.

    Setting ``should_exit`` ends it: no new connections, and ``drain_s`` seconds for open requests.
    """
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=log_level,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=drain_s,
    )
    return _Server(config)


async def listen(server: uvicorn.Server, sock: socket.socket) -> None:
    """Serve on a bound socket. Raises ConfigError if another program has bound it too and was first to listen."""
    host, port = sock.getsockname()[:2]
    try:
        sock.listen(_BACKLOG)  # uvloop, which does the same, keeps the error to itself
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
    await server.serve(sockets=[sock])
