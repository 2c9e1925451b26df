"""What the viewers of the console get (docs/console.md#the-stream), gathered once a second as long
as there is one: the server's facts, its moments, the table of requests, and the doctor's report."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

import msgspec

from setpoint.core.errors import EngineDeadError, RequestError
from setpoint.core.moments import Moment
from setpoint.frontend.console.broadcast import Broadcast, Viewer
from setpoint.frontend.console.server_facts import facts_of
from setpoint.frontend.http.sse import named_event
from setpoint.frontend.service import Service

MAX_VIEWERS = 32
EVERY_S = 1.0
FACTS_EVERY_S = 5.0
ALIVE = b":\n\n"
"""A comment: the server is there, even if it has nothing to tell."""
ANSWER_S = 5.0
"""How long the engine may take to say where its requests are."""


class Watch(Protocol):
    """Provides the server's moments, and what the doctor says about them."""

    @property
    def moments(self) -> Sequence[Moment]:
        """The last minutes, finished moments only."""
        ...

    @property
    def report(self) -> bytes | None:
        """The doctor's latest report as JSON."""
        ...

    def limit_at(self, at: float) -> str | None:
        """The limit that bound in the moment that began then, if it is known."""
        ...

    def followed(self) -> AbstractContextManager[None]:
        """Within the block, moments are fetched as soon as they are finished, because somebody
        watches them."""
        ...


class ConsoleFeed:
    def __init__(self, service: Service, watch: Watch) -> None:
        self._service = service
        self._watch = watch
        self._broadcast = Broadcast()
        self._num_joining = 0
        self._task: asyncio.Task[None] | None = None
        self._facts = self._report = self._table = b""
        """The last event of each kind, encoded."""
        self._moments: deque[tuple[float, bytes]] = deque()
        """The moments that the watch still has: when each began, and its event."""

    @property
    def broadcast(self) -> Broadcast:
        return self._broadcast

    async def join(self) -> Viewer:
        """A new viewer, who begins with the present state and the last minutes. Raises RequestError
        (503) if there are too many, EngineDeadError."""
        if len(self._broadcast) + self._num_joining >= MAX_VIEWERS:
            raise RequestError(
                f"{MAX_VIEWERS} consoles are open already, which is the most.", status_code=503
            )
        if self._task is None or self._task.done():
            self._num_joining += 1
            try:
                await self._look_at_facts()
            finally:
                self._num_joining -= 1
            self._look_at_moments()
        past = [event for _, event in self._moments]
        viewer = self._broadcast.join(self._facts, *past, self._report, self._table)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return viewer

    async def _run(self) -> None:
        """Look until the last viewer has left, or the engine has ended."""
        loop = asyncio.get_running_loop()
        facts_at = loop.time()
        try:
            with self._watch.followed():
                while self._broadcast:
                    began = loop.time()
                    self._look_at_moments()
                    self._look_at_report()
                    with suppress(EngineDeadError, RequestError):  # it may only be slow
                        await self._look_at_requests()
                        if began - facts_at >= FACTS_EVERY_S:
                            facts_at = began
                            await self._look_at_facts()
                    self._broadcast.publish(ALIVE)
                    if not self._service.engine.is_ready:
                        return
                    await asyncio.sleep(max(0.0, began + EVERY_S - loop.time()))
        finally:
            self._broadcast.end()

    def _look_at_moments(self) -> None:
        moments = self._watch.moments
        last = self._moments[-1][0] if self._moments else float("-inf")
        for moment in moments:
            if moment.at > last:
                event = _moment_event(moment, self._watch.limit_at(moment.at))
                self._moments.append((moment.at, event))
                self._broadcast.publish(event)
        while len(self._moments) > len(moments):
            self._moments.popleft()

    def _look_at_report(self) -> None:
        report = self._watch.report
        if report is not None:
            self._report = self._changed(self._report, "doctor", msgspec.Raw(report))

    async def _look_at_requests(self) -> None:
        line = self._service.engine.choose()
        listed = await line.list_requests(timeout_s=ANSWER_S)
        table = self._service.roster.table(listed)
        if table.rows or self._table:
            self._table = self._changed(self._table, "requests", table)

    async def _look_at_facts(self) -> None:
        self._facts = self._changed(self._facts, "state", await facts_of(self._service))

    def _changed(self, before: bytes, name: str, content: Any) -> bytes:
        """The event, published if it differs from the one before."""
        event = named_event(name, content)
        if event != before:
            self._broadcast.publish(event)
        return event


def _moment_event(moment: Moment, limit: str | None) -> bytes:
    content = {name: _short(value) for name, value in msgspec.to_builtins(moment).items()}
    if limit is not None:
        content["limit"] = limit
    return named_event("moment", content)


def _short(value: Any) -> Any:
    """Numbers with the digits that somebody can see."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {name: _short(each) for name, each in value.items()}
    return value
