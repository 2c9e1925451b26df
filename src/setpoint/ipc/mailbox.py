"""The mailbox where the events of one client request wait for their reader. Used on one event loop,
so nothing is locked."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from setpoint.core.messages import TokenEvent

AT_ONCE = 4
"""How many readers may go on in one turn of the event loop. A step can end hundreds of requests,
and making an answer takes about a millisecond: connections and probes are served between turns."""


class Mailbox:
    """Token events of the sequences of one client request, as (index, event). One reader; one
    wake-up per message."""

    def __init__(self) -> None:
        self._events: list[tuple[int, TokenEvent]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self.ranks: dict[int, int] = {}
        """Index -> the rank of the engine that computes the sequence, or did last. Written by the
        EngineClient."""
        self.on_admitted: Callable[[], None] = _nothing
        """Called by the EngineClient when its sequences, which waited for their model to be loaded,
        are sent to the engine."""
        self.is_due = False
        """Whether a WakeUps will wake its reader; written by that."""

    def put(self, index: int, event: TokenEvent) -> None:
        """Add an event; its reader goes on after the next ``wake``."""
        self._events.append((index, event))

    def fail(self, error: Exception) -> None:
        self._error = error
        self.wake()

    async def take(self) -> list[tuple[int, TokenEvent]]:
        """Wait for a first event; return all that have arrived. Once they are read, raises the
        error given to ``fail``."""
        while not self._events:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        events, self._events = self._events, []
        return events

    def wake(self) -> None:
        """Have the reader go on, if it waits."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _nothing() -> None:
    pass


class WakeUps:
    """Wakes the readers of mailboxes in order, AT_ONCE of them in a turn of the event loop."""

    def __init__(self) -> None:
        self._due: deque[Mailbox] = deque()

    def add(self, mailboxes: Iterable[Mailbox]) -> None:
        """Wake these after all that are due; the first at once. One that is due already keeps its
        place: its reader takes all that has arrived by then."""
        is_running = bool(self._due)
        for mailbox in mailboxes:
            if not mailbox.is_due:
                mailbox.is_due = True
                self._due.append(mailbox)
        if self._due and not is_running:
            self._turn()

    def _turn(self) -> None:
        for _ in range(min(AT_ONCE, len(self._due))):
            mailbox = self._due.popleft()
            mailbox.is_due = False
            mailbox.wake()
        if self._due:
            asyncio.get_running_loop().call_soon(self._turn)
