"""Limits how much work the event loop begins in one turn, however many clients connect and ask at
once, and begins urgent work first. Probes, controls and open streams then wait until a few prompts
are prepared, not until all are (docs/decisions/0053-bursts.md)."""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Callable, Set

PER_TURN = 8
"""Most calls in one turn. To prepare a short prompt takes some 0.5 ms."""


class Urgency(enum.IntEnum):
    """The order of work. Requests come before new connections, so that the engine gets its first
    prompts before the last connection of a burst is open."""

    URGENT = 0
    REQUEST = 1
    CONNECTION = 2


class TurnLimiter:
    """Calls what it is given: at once if the present turn has room, otherwise in a later one, by
    rank and then in order."""

    def __init__(self, urgent: Set[str]) -> None:
        """urgent: paths whose requests never wait, although they have a body."""
        self._urgent = urgent
        self._waiting: dict[Urgency, deque[Callable[[], object]]] = {
            rank: deque() for rank in Urgency
        }
        self._room = PER_TURN
        self._is_counting = False
        """Whether the end of the present turn will be noticed."""

    def can_wait(self, method: str, path: str) -> bool:
        """Whether a request probably has a prompt, which takes time to prepare."""
        return method in ("POST", "PUT") and path not in self._urgent

    def call(self, function: Callable[[], object], rank: Urgency) -> None:
        if self._room:
            self._room -= 1
            function()
        else:
            self._waiting[rank].append(function)
        if not self._is_counting:
            self._is_counting = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._is_counting = self._room < PER_TURN or any(self._waiting.values())
        if not self._is_counting:
            return
        asyncio.get_running_loop().call_soon(self._next_turn)
        self._room = PER_TURN
        for waiting in self._waiting.values():
            while waiting and self._room:
                self._room -= 1
                waiting.popleft()()
