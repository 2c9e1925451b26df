"""An engine process in one of its lives, as the session of engines holds it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from setpoint.launch.process import EngineProcess

if TYPE_CHECKING:
    from setpoint.ipc.line import EngineLine


@dataclass(slots=True, eq=False)
class LaunchedEngine:
    process: EngineProcess
    line: EngineLine
    life: int
    """How many engines its rank has had before it."""
    watching: asyncio.Task[None] | None = None
    """Done when the process has ended; None until its line has an owner."""
    made_from: object = None
    """What its job was made from, if it is a standby."""
