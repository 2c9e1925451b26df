"""Runs ``setpoint console FILE``: serves the console's page with a recording, only to this
machine."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys

from setpoint.config.command_options import ConsoleOptions
from setpoint.core.errors import ConfigError
from setpoint.frontend.http.port import bind_socket
from setpoint.frontend.http.serve import Server, small_server
from setpoint.playback.film import Film
from setpoint.playback.playback_routes import create_app

HOST = "127.0.0.1"


def console(options: ConsoleOptions) -> int:
    """Serve the page until Ctrl-C; returns the exit code. Raises ConfigError, or SourceError for a
    file that cannot be shown."""
    if options.file is None:
        raise ConfigError("a recording is missing; see 'setpoint console --help'.")
    sock = bind_socket(HOST, options.port)
    film = Film(options.file)
    for note in film.notes:
        print(f"Note: {note}", file=sys.stderr)
    port = sock.getsockname()[1]
    print(
        f"{options.file}: {len(film.lives)} requests. Open http://{HOST}:{port}/console"
        " (Ctrl-C ends).",
        flush=True,
    )
    server = small_server(create_app(film), where="the console's port")
    asyncio.run(_serve(server, sock))
    return 0


async def _serve(server: Server, sock: socket.socket) -> None:
    """Serve until a signal: open streams are cut."""
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, server.end, 0.0)
    await server.serve(sockets=[sock])
