"""The engine's side of the watchdog (``launch.watchdog``): signs of life from its loop, and the
stacks of its threads when it is asked for them."""

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


def heartbeat(link: _Link, now: Callable[[], float] = time.monotonic) -> Callable[[], None]:
    """Returns a function that must be called at every turn of the loop, and repeatedly during long
    operations. now: returns the time in seconds."""
    next_at = 0.0

    def beat() -> None:
        nonlocal next_at
        at = now()
        if at >= next_at:
            next_at = at + BEAT_S
            link.send(Alive())

    return beat
