"""Defines the state of a rank's engine, as the EngineClient reports it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from setpoint.core.control import PauseMode


@dataclass(slots=True, frozen=True)
class Standing:
    """The state of a rank's engine."""

    dp_rank: int
    state: Literal["starting", "ready", "restarting", "stopped", "ended"]
    """stopped: a signal has stopped its process (SIGSTOP). ended: the rank gets no further
    engine."""
    num_requests: int
    """Number of its open requests."""
    pid: int | None
    """Process id of the engine, or of the one before it; None if it is not known."""
    paused: PauseMode | None
    """The pause that is in force for the rank."""
    num_restarts: int
    """Number of engines that the rank had before this one."""
    death: str
    """Why this engine, or the one before it, has ended; "" if none has. If the rank gets no further
    engine, the text ends with the reason."""
    idle_s: float = 0.0
    """How long it has computed nothing, because it is not there or stands still: it is paused, or
    memory is released. 0 if it computes, or would."""
    is_released: bool = False
    """Whether an operator has released memory, and it computes nothing until all is resumed."""
    is_missed: bool = False
    """Whether that has lasted longer than a restart may take, or will never end, and no operator
    has asked for it."""

    @property
    def is_still(self) -> bool:
        """Whether it is there and computes nothing, or is about to."""
        return self.state == "ready" and (
            self.paused is not None or self.is_released or self.idle_s > 0
        )

    def __str__(self) -> str:
        if self.state == "ready" and self.paused is not None:
            return f"engine {self.dp_rank}: paused ({self.paused})"
        if self.state == "ready" and self.is_released:
            return f"engine {self.dp_rank}: memory released"
        if self.state == "ready" and self.idle_s:
            return f"engine {self.dp_rank}: stands still"
        return f"engine {self.dp_rank}: {self.state}"
