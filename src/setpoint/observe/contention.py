"""Notices that other programs take the CPU on which an engine computes its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from setpoint.core.records import TurnDone

FIRST_S, LATER_S = 10.0, 60.0
"""Seconds of turns after which the share is looked at: at first, and after a warning."""
LEAST_SHARE = 0.7
"""Share of its turns for which a thread that is not disturbed has a CPU. Alone on a machine it is
above 0.95; the rest is page faults, and waits for the other threads of a step."""


class Contention:
    """The turns since it was last asked."""

    def __init__(self) -> None:
        self._busy_s = self._cpu_s = 0.0
        self._due_s = FIRST_S

    def add(self, turn: TurnDone) -> tuple[float, float] | None:
        """Count a turn. Returns the seconds of the last turns, and for how many of them the engine
        had a CPU, when these are too few and a warning is due; otherwise None."""
        if turn.cpu_s is None:
            return None
        self._busy_s += turn.turn_s
        self._cpu_s += turn.cpu_s
        if self._busy_s < self._due_s:
            return None
        busy_s, cpu_s = self._busy_s, self._cpu_s
        self._busy_s = self._cpu_s = 0.0
        is_disturbed = cpu_s < LEAST_SHARE * busy_s
        self._due_s = LATER_S if is_disturbed else FIRST_S
        return (busy_s, cpu_s) if is_disturbed else None
