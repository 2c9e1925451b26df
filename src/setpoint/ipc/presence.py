"""Since when ranks compute nothing, how long that may last, and why their earlier engines ended."""

from __future__ import annotations

from typing import Literal

from setpoint.core.standing import Standing
from setpoint.ipc.balance import Load
from setpoint.ipc.line import EngineLine, EngineState
from setpoint.ipc.orders import Orders

RESTARTS = 2
"""A rank may be gone for so many times the longest restart so far: others may start, too, and the
machine computes what the ended engine had."""
GRACE_S = 10.0
"""And for so long besides: until its end is noticed, and for the pauses before a start."""


class Presence:
    def __init__(self) -> None:
        self._deaths: dict[int, list[str]] = {}
        """Rank -> why each of its earlier engines ended."""
        self._started_at: dict[EngineLine, float] = {}
        """When each line was started, for lines that have never taken requests."""
        self._gone_since: dict[int, float] = {}
        """Since when each rank has been gone, for ranks whose engine has ended or is starting."""
        self._retired: set[int] = set()
        self._longest_start_s = 0.0
        self._longest_restart_s = 0.0

    def attached(self, line: EngineLine, earlier: EngineLine | None) -> None:
        """A rank has a new engine. earlier: the one that it had before."""
        if earlier is not None:
            self._deaths.setdefault(line.rank, []).append(earlier.death)
        self._retired.discard(line.rank)
        self._gone_since.setdefault(line.rank, line.clock.now())
        if not line.was_ready:  # as a standby may be
            self._started_at[line] = line.clock.now()

    def ended(self, line: EngineLine) -> None:
        self._started_at.pop(line, None)
        self._gone_since.setdefault(line.rank, line.clock.now())

    def ready(self, line: EngineLine) -> None:
        self._gone_since.pop(line.rank, None)
        if (began := self._started_at.pop(line, None)) is not None:
            took_s = line.clock.now() - began
            if line.rank in self._deaths:
                self._longest_restart_s = max(self._longest_restart_s, took_s)
            else:
                self._longest_start_s = max(self._longest_start_s, took_s)

    @property
    def most_s(self) -> float:
        """How long a rank may be gone before that counts: what a restart takes, as far as there has
        been one, or else the start of the server."""
        return GRACE_S + RESTARTS * (self._longest_restart_s or self._longest_start_s)

    def retired(self, rank: int) -> None:
        """An operator has taken the rank out of service."""
        self._retired.add(rank)

    def standing(
        self, line: EngineLine, orders: Orders, load: Load | None, why_never: str | None
    ) -> Standing:
        """The state of the rank of this line, its latest. why_never: why it gets no engine after
        one that has ended; None: it gets one."""
        deaths = self._deaths.get(line.rank, [])
        state = _state(line, is_last=why_never is not None, is_first=not deaths)
        death = line.death if line.has_ended else deaths[-1] if deaths else ""
        gone_s = line.seconds_since(self._gone_since.get(line.rank, line.suspended_at))
        still_s = line.still_s
        is_gone = state == "ended" or gone_s > self.most_s
        is_still = still_s > self.most_s and not orders.asks_for_standstill(line.rank)
        return Standing(
            line.rank,
            state,
            0 if load is None else load.num_requests,
            line.pid,
            orders.paused.get(line.rank),
            len(deaths),
            why_never or death,
            idle_s=round(max(gone_s, still_s), 3),
            is_released=orders.holds_released,
            is_missed=is_still or (is_gone and line.rank not in self._retired),
        )


def _state(
    line: EngineLine, *, is_last: bool, is_first: bool
) -> Literal["starting", "ready", "restarting", "stopped", "ended"]:
    if line.has_ended:
        return "ended" if is_last else "restarting"
    if line.state is EngineState.STARTING:
        return "starting" if is_first else "restarting"
    return "stopped" if line.is_suspended else "ready"
