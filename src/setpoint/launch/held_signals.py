"""Holds back the signals that end a program until an event loop handles them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def signals_held() -> Iterator[Callable[[], None]]:
    """Hold SIGNALS back while an event loop starts that will handle them; the loop calls the
    yielded function once it does. Without this, asyncio would answer Ctrl-C during its start by
    cancelling whatever has just begun, and nothing would clean up.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        yield release
    finally:
        release()
