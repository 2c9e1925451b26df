"""An engine process and its line, as the session of engines keeps them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from setpoint.launch.parent.process import EngineProcess

if TYPE_CHECKING:
    from setpoint.ipc.line import EngineLine


@dataclass(slots=True, eq=False)
class LaunchedEngine:
    process: EngineProcess
    line: EngineLine
    number: int
    """Number of the engine among those of its rank that have served or may serve, from 0."""
    watching: asyncio.Task[None] | None = None
    """Done when the process has ended; None until its line has an owner."""
    made_from: object = None
    """The data from which the job of a standby was made."""
