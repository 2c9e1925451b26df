"""Keeps what the user types while nothing reads it, without showing it, for the next prompt.

Works on the modes of a terminal. Between prompts the terminal neither shows typed text nor divides
it into lines, so that it does not disturb an answer, and readline gets every key as if it were
pressed later.
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
"""Index of the local modes in the result of ``tcgetattr``."""
_ENDS_OR_STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP)


class Keyboard:
    """The chat owns the terminal's modes from ``hold`` to ``release``. The shell gets them back as
    they were, however this process ends or is stopped."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._before: list[Any] | None = None
        """The terminal's original modes; None: the chat does not hold the terminal."""
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
    def original_modes(self) -> Iterator[None]:
        """Restore the terminal's original modes within the block, so that readline has the modes
        that it expects and gets what was typed before."""
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
        )  # Ctrl-C stops an answer; it must not discard the next question
        self._set(modes)

    def _set(self, modes: list[Any]) -> None:
        with suppress(termios.error):  # the terminal has gone, and its modes with it
            termios.tcsetattr(
                self._descriptor, termios.TCSADRAIN, modes
            )  # DRAIN keeps what was typed

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        """Restore the terminal, then do the signal's default action. After a stop (Ctrl-Z) the
        process continues here."""
        assert self._before is not None
        now = termios.tcgetattr(self._descriptor)
        self._set(self._before)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, self._on_signal)
        self._set(now)
