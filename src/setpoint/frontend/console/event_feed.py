"""What the viewers of the console get (docs/console.md#the-stream), gathered once a second as long
as there is one: the server's facts, its engines, its moments, the table of requests, and the
doctor's report."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
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


class Lane(Protocol):
    """The last minutes of one rank, or of the whole server."""

    @property
    def moments(self) -> Sequence[Moment]:
        """Finished moments only."""
        ...

    @property
    def limits(self) -> Mapping[float, str | None]:
        """Beginning of a moment -> the limit that bound in it, if it is known."""
        ...


class Watch(Protocol):
    """Provides the server's moments, and what the doctor says about them."""

    @property
    def lanes(self) -> Mapping[int | None, Lane]:
        """None: the whole server; and one for each rank, if there are several."""
        ...

    @property
    def report(self) -> bytes | None:
        """The doctor's latest report as JSON."""
        ...

    def followed(self) -> AbstractContextManager[None]:
        """Within the block, moments are fetched as soon as they are finished, because somebody
        watches them."""
        ...


class ConsoleFeed:
    def __init__(self, service: Service, models: Sequence[Service], watch: Watch) -> None:
        """models: all models of the server."""
        self._service = service
        self._models = models
        self._watch = watch
        self._broadcast = Broadcast()
        self._num_joining = 0
        self._task: asyncio.Task[None] | None = None
        self._facts = self._engines = self._report = self._table = b""
        """The last event of each kind, encoded."""
        self._moments: dict[int | None, deque[tuple[float, bytes]]] = {}
        """The moments that the watch still has, by lane: when each began, and its event."""

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
                try:
                    await self._look_at_facts()
                except EngineDeadError:
                    if not self._facts or self._service.engine.lives.has_ended:
                        raise
            finally:
                self._num_joining -= 1
            self._look_at_moments()
            self._look_at_engines()
        past = [event for events in self._moments.values() for _, event in events]
        viewer = self._broadcast.join(self._facts, self._engines, *past, self._report, self._table)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return viewer

    async def _run(self) -> None:
        """Look until the last viewer has left, or the last engine has ended."""
        loop = asyncio.get_running_loop()
        facts_at = loop.time()
        try:
            with self._watch.followed():
                while self._broadcast:
                    began = loop.time()
                    self._look_at_moments()
                    self._look_at_report()
                    self._look_at_engines()
                    with suppress(EngineDeadError, RequestError):  # it may only be slow
                        await self._look_at_requests()
                        if began - facts_at >= FACTS_EVERY_S:
                            facts_at = began
                            await self._look_at_facts()
                    self._broadcast.publish(ALIVE)
                    if self._service.engine.lives.has_ended:
                        return
                    await asyncio.sleep(max(0.0, began + EVERY_S - loop.time()))
        finally:
            self._broadcast.end()

    def _look_at_moments(self) -> None:
        for rank, lane in self._watch.lanes.items():
            known = self._moments.setdefault(rank, deque())
            last = known[-1][0] if known else float("-inf")
            for moment in lane.moments:
                if moment.at > last:
                    event = _moment_event(moment, rank, lane.limits.get(moment.at))
                    known.append((moment.at, event))
                    self._broadcast.publish(event)
            while len(known) > len(lane.moments):
                known.popleft()

    def _look_at_engines(self) -> None:
        standings = [asdict(each) for each in self._service.engine.standings()]
        self._engines = self._changed(self._engines, "engines", standings)

    def _look_at_report(self) -> None:
        report = self._watch.report
        if report is not None:
            self._report = self._changed(self._report, "doctor", msgspec.Raw(report))

    async def _look_at_requests(self) -> None:
        client = self._service.engine
        listed = await client.list_requests(timeout_s=ANSWER_S) if client.is_ready else []
        table = self._service.events.roster.table(listed, client.waiting_numbers)
        if table.rows or self._table:
            self._table = self._changed(self._table, "requests", table)

    async def _look_at_facts(self) -> None:
        self._facts = self._changed(
            self._facts, "state", await facts_of(self._service, self._models)
        )

    def _changed(self, before: bytes, name: str, content: Any) -> bytes:
        """The event, published if it differs from the one before."""
        event = named_event(name, content)
        if event != before:
            self._broadcast.publish(event)
        return event


def _moment_event(moment: Moment, rank: int | None, limit: str | None) -> bytes:
    content = {name: _short(value) for name, value in msgspec.to_builtins(moment).items()}
    if limit is not None:
        content["limit"] = limit
    if rank is not None:
        content["dp_rank"] = rank
    return named_event("moment", content)


def _short(value: Any) -> Any:
    """Numbers with the digits that somebody can see."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {name: _short(each) for name, each in value.items()}
    return value
