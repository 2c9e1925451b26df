"""Since when ranks compute nothing, and how long that may last."""

from __future__ import annotations

from typing import Literal

from setpoint.core.standing import Standing
from setpoint.ipc.balance import EngineLoad
from setpoint.ipc.engine_life import EngineLife, EngineState
from setpoint.ipc.line import EngineLine
from setpoint.ipc.orders import Orders

RESTARTS = 2
"""A rank may be gone for so many times the longest restart so far: others may start, too, and the
machine computes what the ended engine had."""
GRACE_S = 10.0
"""And for so long besides: until its end is noticed, and for the pauses before a start."""


class Presence:
    def __init__(self) -> None:
        self._started_at: dict[EngineLine, float] = {}
        """When each line was started, for lines that have never taken requests."""
        self._gone_since: dict[int, float] = {}
        """Since when each rank has been gone, for ranks whose engine has ended or is starting."""
        self._longest_start_s = 0.0
        self._longest_restart_s = 0.0

    def attached(self, line: EngineLine) -> None:
        """A rank has a new engine."""
        self._gone_since.setdefault(line.rank, line.clock.now())
        if line.life.state is EngineState.STARTING:  # a standby may be ready
            self._started_at[line] = line.clock.now()

    def ended(self, line: EngineLine) -> None:
        self._started_at.pop(line, None)
        self._gone_since.setdefault(line.rank, line.clock.now())

    def ready(self, line: EngineLine) -> None:
        self._gone_since.pop(line.rank, None)
        if (began := self._started_at.pop(line, None)) is not None:
            took_s = line.clock.now() - began
            if line.life.num_before:
                self._longest_restart_s = max(self._longest_restart_s, took_s)
            else:
                self._longest_start_s = max(self._longest_start_s, took_s)

    @property
    def most_s(self) -> float:
        """How long a rank may be gone before that counts: what a restart takes, as far as there has
        been one, or else the start of the server."""
        return GRACE_S + RESTARTS * (self._longest_restart_s or self._longest_start_s)

    def standing(
        self, line: EngineLine, orders: Orders, load: EngineLoad | None, why_last: str
    ) -> Standing:
        """The state of the rank of this line, its latest. why_last: why it gets no engine after
        one that has ended; "" if it gets one."""
        life = line.life
        state = _state(life, is_last=bool(why_last))
        death = life.death if life.has_ended else life.death_before
        gone_s = line.seconds_since(self._gone_since.get(line.rank, life.suspended_at))
        still_s = line.still_s
        is_gone = state == "ended" or gone_s > self.most_s
        is_still = still_s > self.most_s and not orders.asks_for_standstill(line.rank)
        return Standing(
            line.rank,
            state,
            0 if load is None else load.num_requests,
            line.pid,
            orders.paused.get(line.rank),
            life.num_before,
            why_last or death,
            idle_s=round(max(gone_s, still_s), 3),
            is_released=orders.holds_released,
            is_missed=is_still or (is_gone and not life.is_retired),
        )


def _state(
    life: EngineLife, *, is_last: bool
) -> Literal["starting", "ready", "restarting", "stopped", "ended"]:
    if life.has_ended:
        return "ended" if is_last else "restarting"
    if life.state is EngineState.STARTING:
        return "restarting" if life.num_before else "starting"
    return "stopped" if life.is_suspended else "ready"
