"""Detects an answer that repeats the same passage without end. Works on text, not tokens, so any
server's answers can be checked."""

from __future__ import annotations

COPIES = 4
"""Copies of one passage, directly after one another, that count as endless repetition."""
MIN_CHARS = 240
"""Least number of characters in all copies together: rows of a table and ruled lines are
shorter."""
MAX_PASSAGE = 800
"""Most characters of a repeated passage that is looked for."""


def goes_in_circles(text: str) -> bool:
    """Whether ``text`` ends with COPIES or more copies of one passage; part of another copy may
    follow."""
    tail = text[-COPIES * MAX_PASSAGE :]
    for period in range(1, min(MAX_PASSAGE, len(tail) // COPIES) + 1):
        length = max(COPIES * period, MIN_CHARS)
        if length <= len(tail) and tail[-length:-period] == tail[period - length :]:
            return True
    return False


class CircleWatch:
    """Checks a growing answer every STEP characters."""

    STEP = 32

    def __init__(self) -> None:
        self._look_at = self.STEP

    def stops(self, text: str) -> bool:
        """Whether the answer should stop. ``text``: the answer so far."""
        if len(text) < self._look_at:
            return False
        self._look_at = len(text) + self.STEP
        return goes_in_circles(text)
