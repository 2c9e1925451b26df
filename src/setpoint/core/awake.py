"""A clock that stops while this process is paused (SIGSTOP, a debugger, ``docker pause``). Time
limits on what other processes owe this one are counted on it, because a paused process cannot take
what they send. CLOCK_MONOTONIC stops only while the whole machine sleeps.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from setpoint.core.executor import Clock

TICK_S = 0.25
LEAP_S = 2.0
"""The most that one tick may count. A busy machine delays ticks by less; what is longer was a
pause."""


class AwakeClock:
    """A thread ticks while the process runs; each tick counts the time since the one before, but at
    most LEAP_S. The thread starts with the first call of ``now``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._tick = 0.0, time.monotonic()
        """(seconds counted so far, time of that count on CLOCK_MONOTONIC)."""

    def now(self) -> float:
        """Seconds that this process has been running, from an arbitrary zero point."""
        if self._thread is None:
            self._start()
        return self._elapsed()

    def _elapsed(self) -> float:
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
            self._tick = self._elapsed(), time.monotonic()


CLOCK = AwakeClock()
"""The clock of this process."""


@asynccontextmanager
async def timeout_awake(seconds: float, clock: Clock = CLOCK) -> AsyncIterator[None]:
    """Like ``asyncio.timeout``, on a clock that may stop. Raises TimeoutError."""
    loop, end = asyncio.get_running_loop(), clock.now() + seconds
    timer: asyncio.TimerHandle

    def check() -> None:
        nonlocal timer
        if (left := end - clock.now()) > 0:
            timer = loop.call_later(left, check)
        else:
            limit.reschedule(loop.time())

    async with asyncio.timeout(None) as limit:
        timer = loop.call_later(seconds, check)
        try:
            yield
        finally:
            timer.cancel()
