"""Limits how many engines are started again within an hour (--max-engine-restarts)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

HOUR_S = 3600.0


class RestartBudget:
    def __init__(self, most: int, now: Callable[[], float] = time.monotonic) -> None:
        """now: a clock in seconds."""
        self.most = most
        self._now = now
        self._spent: deque[float] = deque()
        """Times of the restarts within the last hour."""

    @property
    def num_spent(self) -> int:
        """Number of restarts within the last hour."""
        now = self._now()
        while self._spent and now - self._spent[0] > HOUR_S:
            self._spent.popleft()
        return len(self._spent)

    @property
    def left(self) -> int:
        return max(self.most - self.num_spent, 0)

    def spend(self) -> None:
        self._spent.append(self._now())

    def reset(self) -> None:
        self._spent.clear()
