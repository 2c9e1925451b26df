"""Runs ``setpoint top``: shows a server live until Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from rich.console import Console

from setpoint.config.command_options import TopOptions
from setpoint.core.addresses import check_url
from setpoint.core.errors import ConfigError
from setpoint.observe.progress_display import Waiting, on_stderr
from setpoint.top.events import Lost, events
from setpoint.top.painter import Painter
from setpoint.top.screen import ServerScreen, screen

AGAIN_S = 2.0
LOST = "lost"
"""Marks the end of a stream, in place of the name of an event."""
LINE_EVERY_S = 5.0
"""Seconds between two lines if the output is not a terminal."""


def top(wanted: TopOptions, *, api_key: str | None) -> int:
    """Show a server until Ctrl-C; returns the exit code. api_key: the server's key if the command
    line gives none. Raises ConfigError, and RequestError if the server does not answer at the
    start. A server that disappears later may come back."""
    if wanted.url is None:
        raise ConfigError("name the server to show: setpoint top URL.")
    check_url(wanted.url)
    with suppress(KeyboardInterrupt):
        _show(wanted.url, wanted.api_key or api_key, Console(highlight=False))
    return 0


def _show(url: str, api_key: str | None, console: Console) -> None:
    server = ServerScreen()
    stream = events(url, api_key)
    waiting = Waiting(f"Waiting for {url}", on_stderr())
    try:
        server.take(*next(stream))  # an error before the first event ends the command
    finally:
        waiting.end()
    if not console.is_terminal:
        _follow(stream, server, url, api_key, _Lines(server, console).renew)
        return
    painter = Painter(console)
    with painter.shown():

        def renew(name: str) -> None:
            if name == LOST or painter.is_due:
                painter.draw(screen(server, console, url=url))

        _follow(stream, server, url, api_key, renew)


def _follow(
    stream: Iterator[tuple[str, Any]],
    server: ServerScreen,
    url: str,
    api_key: str | None,
    renew: Callable[[str], None],
) -> None:
    """Take the events of this stream, and of the streams that replace it when it is lost. renew: is
    called with the name of each event after the event is taken."""
    while True:
        try:
            for name, content in stream:
                server.take(name, content)
                renew(name)
        except Lost as lost:
            server.lost(str(lost))
            renew(LOST)
            time.sleep(AGAIN_S)
            stream = events(url, api_key)


class _Lines:
    """Prints a line every few seconds."""

    def __init__(self, server: ServerScreen, console: Console) -> None:
        self._server = server
        self._console = console
        self._due = 0.0

    def renew(self, name: str) -> None:
        if name == LOST or (name == "" and time.monotonic() >= self._due):
            if name == "":
                self._due = time.monotonic() + LINE_EVERY_S
            text = f"{time.strftime('%H:%M:%S')} {self._server.line}"
            self._console.print(text, markup=False)
