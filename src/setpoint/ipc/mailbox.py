"""The mailbox where the events of one client request wait for their reader. Used on one event loop,
so nothing is locked."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from setpoint.core.messages import TokenEvent

Events = deque[tuple[int, TokenEvent]]
"""Events with the indices of their sequences."""

AT_ONCE = 4
"""How many readers may go on in one turn of the event loop. A step can end hundreds of requests,
and making an answer takes about a millisecond: connections and probes are served between turns."""


class Mailbox:
    """Token events of the sequences of one client request, as (index, event). One reader; one
    wake-up per message."""

    def __init__(self, *, most_events: int = 8) -> None:
        """most_events: how many wait before ``on_full`` is called."""
        self._most_events = most_events
        self._events: Events = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._is_early = False
        """Whether the time until which ``take`` waits is still to come."""
        self._has_end = False
        """Whether a sequence has ended since the events were last taken."""
        self._error: Exception | None = None
        self.ranks: dict[int, int] = {}
        """Index -> the rank of the engine that computes the sequence, or did last. Written by the
        EngineClient."""
        self.on_admitted: Callable[[], None] = _nothing
        """Called by the EngineClient when its sequences, which waited for their model to be loaded,
        are sent to the engine."""
        self.on_full: Callable[[int, TokenEvent], bool] | None = None
        """Takes the oldest event over when many wait, and returns whether it did; if not, the event
        goes on waiting. Written by the reader, which has it take them while it waits for something
        else."""
        self.wake_ups: WakeUps | None = None
        """Wakes its reader when the time of ``take`` has come; None: nothing but the loop does.
        Written by the EngineClient."""
        self.is_due = False
        """Whether a WakeUps will wake its reader; written by that."""

    def put(self, index: int, event: TokenEvent) -> None:
        """Add an event; its reader goes on after the next ``wake``."""
        self._events.append((index, event))
        self._has_end = self._has_end or event.finish is not None
        for _ in range(2):  # not all: a message has an event for each of hundreds of sequences
            if self.on_full is None or len(self._events) <= self._most_events:
                break
            oldest = self._events.popleft()
            if not self.on_full(*oldest):
                self._events.appendleft(oldest)
                break

    def fail(self, error: Exception) -> None:
        self._error = error
        self.wake()

    async def take(self, until: float | None = None) -> Events:
        """Wait for a first event, or until a time of the event loop if no sequence ends before;
        return all that have arrived, possibly none. Once they are read, raises the error given to
        ``fail``."""
        loop = asyncio.get_running_loop()
        timer = None
        if until is not None:  # one in the past, too, so that readers go on a few at a time
            self._is_early, timer = True, loop.call_at(until, self._on_time)
        try:
            while self.is_early or not (self._events or until is not None or self._error):
                self._waiter = loop.create_future()
                await self._waiter
        finally:
            self._is_early = False
            if timer is not None:
                timer.cancel()
        if self._error is not None and not self._events:
            raise self._error
        return self.arrived()

    def arrived(self) -> Events:
        """All events that have arrived; does not wait."""
        events, self._events = self._events, deque()
        self._has_end = False
        return events

    def wake(self) -> None:
        """Have the reader go on, if it waits, and not until a later time."""
        if self._waiter is not None and not self._waiter.done() and not self.is_early:
            self._waiter.set_result(None)

    @property
    def is_early(self) -> bool:
        """Whether its reader waits until a later time and no event has ended a sequence."""
        return self._is_early and not (self._has_end or self._error)

    def _on_time(self) -> None:
        self._is_early = False
        if self.wake_ups is None:
            self.wake()
        else:
            self.wake_ups.add([self])


def _nothing() -> None:
    pass


class WakeUps:
    """Wakes the readers of mailboxes in order, AT_ONCE of them in a turn of the event loop."""

    def __init__(self) -> None:
        self._due: deque[Mailbox] = deque()
        self._room = AT_ONCE
        """How many more may be woken in the present turn."""

    def add(self, mailboxes: Iterable[Mailbox]) -> None:
        """Wake these after all that are due; the first at once. One that is due already keeps its
        place: its reader takes all that has arrived by then."""
        for mailbox in mailboxes:
            if not mailbox.is_due and not mailbox.is_early:
                mailbox.is_due = True
                self._due.append(mailbox)
        self._go_on()

    def _go_on(self) -> None:
        while self._due and self._room:
            if self._room == AT_ONCE:
                asyncio.get_running_loop().call_soon(self._next_turn)
            self._room -= 1
            mailbox = self._due.popleft()
            mailbox.is_due = False
            mailbox.wake()

    def _next_turn(self) -> None:
        self._room = AT_ONCE
        self._go_on()
