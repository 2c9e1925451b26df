"""Finds an engine whose loop hangs (--watchdog-timeout), from the parent process: code that hangs
may hold the interpreter's lock, so no thread of the engine could.

Only time counts in which both processes ran. A pause of either (SIGSTOP, ``docker pause``, a
debugger) leaves nothing to find (decision 0050).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import psutil

from setpoint.core.awake import CLOCK

if TYPE_CHECKING:
    from setpoint.ipc.line import EngineLine

LOOK_S = 0.5
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


async def until_silent(pid: int, line: EngineLine, limit_s: float) -> None:
    """Return when the engine's loop has given no sign of life for ``limit_s``."""
    heard, since = line.num_received, CLOCK.now()
    while CLOCK.now() - since < limit_s:
        await asyncio.sleep(LOOK_S)
        if line.num_received != heard or not line.is_ready or _is_stopped(pid):
            heard, since = line.num_received, CLOCK.now()


def _is_stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() in _STOPPED
    except psutil.NoSuchProcess:
        return True
