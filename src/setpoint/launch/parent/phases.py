"""Measures how long each phase of a start takes, from the start of the process until it is
ready."""

from __future__ import annotations

import time


class Phases:
    """Name of each phase -> its seconds, in order; each mark ends a phase."""

    def __init__(self, started_at: float | None = None) -> None:
        """started_at: seconds since the epoch; by default the start of this process."""
        self._last = time.time()
        self.seconds: dict[str, float] = {
            "interpreter": max(self._last - (started_at or _process_started_at()), 0.0)
        }

    def mark(self, name: str) -> None:
        now = time.time()
        self.seconds[name] = now - self._last
        self._last = now

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return f"{sum(self.seconds.values()):.1f} s from process start ({parts})"


def _process_started_at() -> float:
    import psutil

    return float(psutil.Process().create_time())
