"""The mailbox where the events of one client request wait for their reader. Used on one event loop,
so nothing is locked."""

from __future__ import annotations

import asyncio

from setpoint.core.messages import TokenEvent


class Mailbox:
    """Token events of the sequences of one client request, as (index, event). One reader; one
    wake-up per message."""

    def __init__(self) -> None:
        self._events: list[tuple[int, TokenEvent]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None

    def put(self, index: int, event: TokenEvent) -> None:
        self._events.append((index, event))
        self._wake()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._wake()

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

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
