"""When an answer goes round in circles. Works on text; it knows no tokens, so any server's answers
can be judged."""

from __future__ import annotations

COPIES = 4
"""Of one passage, one directly after the other."""
AT_LEAST = 240
"""Characters of all copies together: a row of a table and a ruled line are shorter."""
LONGEST = 800
"""Characters of a passage that is looked for."""


def goes_in_circles(text: str) -> bool:
    """Whether ``text`` ends with the same passage COPIES times or more; a part of one may
    follow."""
    tail = text[-COPIES * LONGEST :]
    for period in range(1, min(LONGEST, len(tail) // COPIES) + 1):
        length = max(COPIES * period, AT_LEAST)
        if length <= len(tail) and tail[-length:-period] == tail[period - length :]:
            return True
    return False


class CircleWatch:
    """Looks at an answer that grows, every STEP characters."""

    STEP = 32

    def __init__(self) -> None:
        self._look_at = self.STEP

    def stops(self, text: str) -> bool:
        """``text``: the answer so far."""
        if len(text) < self._look_at:
            return False
        self._look_at = len(text) + self.STEP
        return goes_in_circles(text)
