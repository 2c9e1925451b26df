"""Where slow work says what it is doing, for whoever waits for it. Costs next to nothing where
nobody does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_listener: ContextVar[Callable[[str], None] | None] = ContextVar("setpoint progress", default=None)


def report(doing: str) -> None:
    """Say what is being done at the moment, e.g. "compiling the C++ kernels, 3 of 9 files"."""
    listener = _listener.get()
    if listener is not None:
        listener(doing)


@contextmanager
def reported_to(listener: Callable[[str], None]) -> Iterator[None]:
    """Inside, in this thread or task, ``listener`` gets what is reported."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
