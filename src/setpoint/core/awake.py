"""Time in which this process runs. A process that is paused (SIGSTOP, a debugger, ``docker pause``)
cannot do anything about a time limit meanwhile, so limits on what others owe it are counted on this
clock. CLOCK_MONOTONIC itself stands still only while the whole machine sleeps.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

TICK_S = 0.25
LEAP_S = 2.0
"""The most that one tick may count. A busy machine delays ticks by less; what is longer was a
pause."""


class AwakeClock:
    """A thread makes ticks, which a paused process does not make; each counts the time since the
    one before, but at most LEAP_S. The thread starts at the first look."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._tick = 0.0, time.monotonic()
        """Seconds counted so far, and when that was."""

    def now(self) -> float:
        """Seconds that this process has run, from an arbitrary beginning."""
        if self._thread is None:
            self._start()
        return self._counted()

    def _counted(self) -> float:
        counted, at = self._tick
        return counted + min(time.monotonic() - at, LEAP_S)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._tick = self._tick[0], time.monotonic()
                self._thread = threading.Thread(target=self._run, name="awake", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            time.sleep(TICK_S)
            self._tick = self._counted(), time.monotonic()


CLOCK = AwakeClock()
"""This process's."""


@asynccontextmanager
async def timeout_awake(seconds: float) -> AsyncIterator[None]:
    """Like ``asyncio.timeout``, on CLOCK. Raises TimeoutError."""
    loop, end = asyncio.get_running_loop(), CLOCK.now() + seconds
    timer: asyncio.TimerHandle

    def look() -> None:
        nonlocal timer
        if (left := end - CLOCK.now()) > 0:
            timer = loop.call_later(left, look)
        else:
            limit.reschedule(loop.time())

    async with asyncio.timeout(None) as limit:
        timer = loop.call_later(seconds, look)
        try:
            yield
        finally:
            timer.cancel()
