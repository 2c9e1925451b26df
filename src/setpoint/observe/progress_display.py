"""Shows a person what a start is doing once it takes noticeably long. A thread shows the latest
description and the seconds so far; it does not know what the description means.
"""

from __future__ import annotations

import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from setpoint.core.excerpt import printable

logger = logging.getLogger(__name__)

FIRST_S = 3.0
"""Work that ends sooner is not shown."""
REDRAW_S, LINES_S = 0.5, 10.0


@dataclass(slots=True, frozen=True)
class Display:
    """A way to show progress, and its interval."""

    show: Callable[[str], None]
    every_s: float
    clear: Callable[[], None] = lambda: None
    """Removes what is shown."""


def on_stderr() -> Display:
    """A display on stderr: on a terminal one line that is redrawn and removed at the end, elsewhere
    a new line from time to time."""
    if sys.stderr.isatty():
        return Display(
            lambda text: _write(f"\r\x1b[K{_fit(text)}"), REDRAW_S, lambda: _write("\r\x1b[K")
        )
    return stderr_lines()


def stderr_lines() -> Display:
    return Display(lambda text: _write(f"setpoint: {text}\n"), LINES_S)


def in_the_log() -> Display:
    return Display(lambda text: logger.info("%s", text), LINES_S)


def _fit(text: str) -> str:
    """The text, shortened in the middle to the terminal's width: a longer line could not be
    removed. The end stays because it has the seconds."""
    room = shutil.get_terminal_size().columns - 1
    return (
        text
        if len(text) <= room
        else f"{text[: room // 2]}…{text[len(text) - (room - room // 2 - 1) :]}"
    )


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


class Waiting:
    """Shows progress from its creation to ``end``. Safe to use from any thread."""

    def __init__(self, what: str, display: Display | None, *, first_s: float = FIRST_S) -> None:
        """what: for example "Loading a model". display: None shows nothing."""
        self._what = what
        self._doing = ""
        self._display = display
        self._first_s = first_s
        self._started_at = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="setpoint-waiting", daemon=True)
        if display is not None:
            self._thread.start()

    def doing(self, text: str) -> None:
        """Set the description of what is being done from now on."""
        self._doing = printable(text)

    def end(self) -> None:
        """Stop showing progress. May be called twice."""
        self._over.set()
        if self._display is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        assert self._display is not None
        wait_s = self._first_s
        while not self._over.wait(wait_s):
            wait_s = self._display.every_s
            seconds = time.monotonic() - self._started_at
            self._display.show(f"{self._what}{self._doing and ': '}{self._doing} … {seconds:.0f} s")
        if wait_s == self._display.every_s:
            self._display.clear()
