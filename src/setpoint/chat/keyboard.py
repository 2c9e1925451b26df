"""What somebody types while nobody reads: kept, unseen, for the next prompt.

Works on the modes of a terminal. Between prompts the terminal neither shows what is typed nor cuts
it into lines, so that an answer stays whole, and readline gets every key as if it came later.
"""

from __future__ import annotations

import os
import signal
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

_LOCAL = 3
"""Where the local modes stand in what ``tcgetattr`` returns."""
_ENDS_OR_STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP)


class Keyboard:
    """From ``hold`` to ``release`` the terminal is ours; the shell gets it back as it was, whatever
    ends or stops this process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._before: list[Any] | None = None
        """The modes that are not ours; None: nothing is held."""
        self._handlers: dict[signal.Signals, Any] = {}

    def hold(self) -> None:
        self._before = termios.tcgetattr(self._descriptor)
        self._handlers = {
            number: signal.signal(number, self._on_signal) for number in _ENDS_OR_STOPS
        }
        self._hide()

    def release(self) -> None:
        if self._before is not None:
            self._set(self._before)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._before = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """A prompt: whoever reads gets what was typed before, and the modes it knows."""
        if self._before is None:
            yield
            return
        self._set(self._before)
        try:
            yield
        finally:
            self._hide()

    def _hide(self) -> None:
        modes = termios.tcgetattr(self._descriptor)
        modes[_LOCAL] &= ~(termios.ECHO | termios.ICANON)
        modes[_LOCAL] |= (
            termios.NOFLSH
        )  # Ctrl-C stops an answer; it does not take the next question away
        self._set(modes)

    def _set(self, modes: list[Any]) -> None:
        with suppress(termios.error):  # the terminal is gone, and its modes with it
            termios.tcsetattr(
                self._descriptor, termios.TCSADRAIN, modes
            )  # DRAIN: what was typed stays

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        """Do what the signal does without us, with the terminal as it was. After a stop (Ctrl-Z)
        life goes on here."""
        assert self._before is not None
        now = termios.tcgetattr(self._descriptor)
        self._set(self._before)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, self._on_signal)
        self._set(now)
