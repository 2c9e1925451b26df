"""An event loop whose time passes only when nothing is left to do at the present moment, and then at
once. It has no files, threads or signals, so that equal programs do equal things."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

LEAP_S = 2.0
"""The most that an AwakeClock counts of a pause (``core.awake``)."""
TURN_S = 1e-9
"""What a turn of the loop takes: who waits for less than a float can add to the time gets there."""


class Standstill(Exception):
    """Nothing will ever happen any more, but somebody waits."""


class File(Protocol):
    """What a loop watches for readers and writers under a number."""

    @property
    def is_readable(self) -> bool: ...

    @property
    def is_writable(self) -> bool: ...


class VirtualLoop(asyncio.BaseEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._at = 0.0
        self._selector = self  # which the base class asks for events, and so lets time pass
        self._uncounted_s = 0.0
        self.files: dict[int, File] = {}
        """What ``add_reader`` and ``add_writer`` may be called with."""
        self._readers: dict[int, Callable[[], None]] = {}
        self._writers: dict[int, Callable[[], None]] = {}
        self.failures: list[str] = []
        """What callbacks and forgotten tasks raised."""
        self.set_exception_handler(self._failed)

    def time(self) -> float:
        return self._at

    def now(self) -> float:
        """Implements Clock as the product's AwakeClock does: of a pause it counts LEAP_S."""
        return self._at - self._uncounted_s

    def leap(self, seconds: float) -> None:
        """The whole machine is paused for so long (``docker pause``): what was due meanwhile is due
        now."""
        self._at += seconds
        self._uncounted_s += max(seconds - LEAP_S, 0.0)

    def select(self, timeout: float | None) -> list[Any]:
        """Called by the base class when it has nothing to do for ``timeout``."""
        if timeout is None:
            raise Standstill
        self._at += max(timeout, TURN_S)
        return []

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:
        self._readers[fd] = callback
        if self.files[fd].is_readable:
            self.notify_readable(fd)

    def remove_reader(self, fd: Any) -> bool:
        return self._readers.pop(fd, None) is not None

    def add_writer(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:
        self._writers[fd] = callback
        if self.files[fd].is_writable:
            self.notify_writable(fd)

    def remove_writer(self, fd: Any) -> bool:
        return self._writers.pop(fd, None) is not None

    def notify_readable(self, fd: int) -> None:
        self.call_soon(self._run, self._readers, fd)

    def notify_writable(self, fd: int) -> None:
        self.call_soon(self._run, self._writers, fd)

    def _run(self, table: dict[int, Callable[[], None]], fd: int) -> None:
        if fd in table:
            table[fd]()

    def _process_events(self, event_list: list[Any]) -> None:
        """Nothing comes from outside."""

    def _write_to_self(self) -> None:
        """The loop runs in one thread, so it need not be woken."""

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.failures.append(f"{context['message']}: {context.get('exception')!r}")
