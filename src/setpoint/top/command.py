"""``setpoint top``: shows a server live, until Ctrl-C."""

from __future__ import annotations

import time
from contextlib import suppress

from rich.console import Console
from rich.live import Live

from setpoint.config.running_server import TopOptions
from setpoint.core.errors import ConfigError
from setpoint.top.events import Lost, events
from setpoint.top.screen import Server, screen

AGAIN_S = 2.0
LINE_EVERY_S = 5.0
"""Where the output is no terminal."""


def top(wanted: TopOptions, *, api_key: str | None) -> int:
    """``api_key``: for a command line without one. Returns the exit code. Raises ConfigError, and
    RequestError if the server cannot be shown; one that was shown may go away and come back."""
    if wanted.url is None:
        raise ConfigError("say which server to show: setpoint top URL.")
    with suppress(KeyboardInterrupt):
        _show(wanted.url, wanted.api_key or api_key, Console(highlight=False))
    return 0


def _show(url: str, api_key: str | None, console: Console) -> None:
    server = Server()
    stream = events(url, api_key)
    server.take(*next(stream))  # what is wrong from the start ends the command
    if not console.is_terminal:
        _write_lines(server, url, api_key, console)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                for name, content in stream:
                    server.take(name, content)
                    if name in ("", "moment"):
                        live.update(screen(server, console, url=url), refresh=True)
            except Lost as lost:
                server.lost(str(lost))
                live.update(screen(server, console, url=url), refresh=True)
                time.sleep(AGAIN_S)
                stream = events(url, api_key)


def _write_lines(server: Server, url: str, api_key: str | None, console: Console) -> None:
    """A line every few seconds."""
    due = 0.0
    while True:
        try:
            for name, content in events(url, api_key):
                server.take(name, content)
                if name == "" and time.monotonic() >= due:
                    due = time.monotonic() + LINE_EVERY_S
                    console.print(f"{time.strftime('%H:%M:%S')} {server.line}", markup=False)
        except Lost as lost:
            server.lost(str(lost))
            console.print(f"{time.strftime('%H:%M:%S')} {server.line}", markup=False)
            time.sleep(AGAIN_S)
