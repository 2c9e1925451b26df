"""The engine's side of the watchdog (``launch.parent.watchdog``): signs of life from its loop, and
the stacks of its threads when it is asked for them."""

from __future__ import annotations

import faulthandler
import signal
import time
from collections.abc import Callable
from typing import Protocol

from setpoint.core.messages import Alive, ToFrontend

BEAT_S = 0.5
"""Shortest time between two signs of life."""
STACKS = signal.SIGUSR1
"""Signal that makes an engine process write the stacks of all its threads to its stderr. C code
does that at once, whatever Python code is running."""


class _Link(Protocol):
    def send(self, message: ToFrontend) -> None: ...


def write_stacks_when_asked() -> None:
    """Must be called at the start of an engine process."""
    faulthandler.register(STACKS, all_threads=True)


class Heartbeat:
    """Must be called at every turn of the loop, and repeatedly during long operations."""

    def __init__(
        self,
        link: _Link,
        stands_still: Callable[[], bool],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """stands_still: returns whether the engine plans no steps. now: returns the time in
        seconds."""
        self._link = link
        self._stands_still = stands_still
        self._now = now
        self._next_at = 0.0

    def __call__(self) -> None:
        at = self._now()
        if at >= self._next_at:
            self._next_at = at + BEAT_S
            self._link.send(Alive(self._stands_still()))
