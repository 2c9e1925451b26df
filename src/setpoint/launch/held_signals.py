"""Signals that end a program, held back until an event loop handles them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def signals_held() -> Iterator[Callable[[], None]]:
    """Around the making of an event loop that handles SIGNALS, which calls what this yields once it
    does.

    Until then they wait: asyncio's own start would answer Ctrl-C by cancelling whatever has just
    begun, with nobody to clean up after it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        yield release
    finally:
        release()
