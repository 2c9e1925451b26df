"""Detects, in the parent process, an engine whose loop hangs (--watchdog-timeout). No thread of the
engine could do this, because code that hangs may hold the interpreter's lock.

Only time in which both processes ran counts. A pause of either process (SIGSTOP, ``docker pause``,
a debugger) therefore triggers nothing (decision 0050).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from setpoint.ipc.line import EngineLine

LOOK_S = 0.5


async def until_silent(is_stopped: Callable[[], bool], line: EngineLine, limit_s: float) -> None:
    """Return when the engine's loop has given no sign of life for ``limit_s``. is_stopped: whether
    its process is stopped now."""
    clock = line.clock
    heard, since = line.num_received, clock.now()
    while clock.now() - since < limit_s:
        await asyncio.sleep(LOOK_S)
        if line.num_received != heard or not line.life.is_ready or is_stopped():
            heard, since = line.num_received, clock.now()
