"""How it stands with the engine of a rank, as the EngineClient tells it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from setpoint.core.control import PauseMode


@dataclass(slots=True, frozen=True)
class Standing:
    """How it stands with the engine of a rank."""

    dp_rank: int
    state: Literal["starting", "ready", "restarting", "stopped", "ended"]
    """Stopped: its process has been stopped by a signal (SIGSTOP). Ended: it gets no other."""
    num_requests: int
    """Its open requests."""
    pid: int | None
    """Its process, or that of the engine before it; None if it is not known."""
    paused: PauseMode | None
    """The pause that is in force for the rank."""
    num_restarts: int
    """How many engines the rank has had before this one."""
    death: str
    """Why this engine, or the one before it, has ended; "" if none has. If the rank gets no other,
    it ends with why not."""

    def __str__(self) -> str:
        return f"engine {self.dp_rank}: {self.state}"
