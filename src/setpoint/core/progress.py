"""Lets slow work report what it is doing. A report costs next to nothing if nobody listens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_listener: ContextVar[Callable[[str], None] | None] = ContextVar("setpoint progress", default=None)


def report(doing: str) -> None:
    """Report the current activity, e.g. "compiling the C++ kernels, 3 of 9 files"."""
    listener = _listener.get()
    if listener is not None:
        listener(doing)


@contextmanager
def reported_to(listener: Callable[[str], None]) -> Iterator[None]:
    """Pass every report to ``listener`` within the block, in this thread or task."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
