"""How long the engine's loop waits for grammars."""

from __future__ import annotations

import time
from collections.abc import Callable

QUICK_S = 0.005
"""Work of one token that takes at most this is not slow: that of usual schemas takes a tenth."""
BURST_S = 0.05
SHARE = 0.2
"""Slow work may keep the loop for the first of these at once, in seconds, and for the second part
of the time on average."""


class Patience:
    """The seconds that slow grammars may still take from the loop; one for all of an engine's."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left_s = BURST_S
        self._at = clock()

    @property
    def left_s(self) -> float:
        """At most BURST_S; 0 or less if the loop should not wait at all."""
        now = self._clock()
        self._left_s = min(BURST_S, self._left_s + SHARE * (now - self._at))
        self._at = now
        return self._left_s

    def spend(self, seconds: float) -> None:
        """Count what the work of one token has taken from the loop."""
        if seconds > QUICK_S:
            self._left_s -= seconds
