"""Watches the engine: keeps the moments of the last minutes, and what a doctor says about them. The
doctor is injected, because nothing here knows how to judge.

The engine is not asked while no request is open and nobody follows. One that ends leaves its
moments; those of the next one come after a gap.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from setpoint.core.control import Moments
from setpoint.core.errors import EngineDeadError, RequestError
from setpoint.core.moments import Moment
from setpoint.frontend.telemetry.latencies import Latencies
from setpoint.frontend.telemetry.limit_news import Diagnosis, LimitNews
from setpoint.ipc.client import EngineClient
from setpoint.ipc.line import EngineLine

logger = logging.getLogger(__name__)

KEPT_S = 600.0
FOLLOWED_S, LOOK_S = 1.0, 5.0
"""How often the engine is asked: while somebody follows, and otherwise."""
EXAMINE_S = 10.0
"""The doctor is asked at most so often."""
WINDOW_S = 120.0
"""Seconds that the doctor judges: the last two minutes."""
ANSWER_S = 2.0
"""How long the engine may take to answer, which it does between two steps."""
REST_S = 30.0
"""After this time without requests no limit binds."""


@dataclass(slots=True)
class Life:
    """What is known of one engine."""

    line: EngineLine
    moments: deque[Moment] = field(default_factory=deque)
    """The moments of the last minutes, in the order of time."""
    next: int = 0
    """Number of the first moment that the engine has not told yet."""
    silence: str = ""
    """Why the engine did not answer when it was last asked; "" if it did."""

    @property
    def death(self) -> str:
        """Why the engine has ended; "" if it has not."""
        return self.line.death if self.line.has_ended else ""

    def last(self, seconds: float) -> list[Moment]:
        """The moments that ended in the last ``seconds`` before the end of the last one."""
        if not self.moments:
            return []
        since = self.moments[-1].at + self.moments[-1].seconds - seconds
        return [moment for moment in self.moments if moment.at + moment.seconds > since]


class Doctor(Protocol):
    def examine(self, life: Life, moments: Sequence[Moment]) -> Diagnosis:
        """Judge these moments of the life. Called in a thread."""
        ...

    def limits_of(self, life: Life, moments: Sequence[Moment]) -> list[str | None]:
        """The limit that binds in each of these moments, if it tells."""
        ...


class Watch:
    def __init__(self, client: EngineClient, latencies: Latencies) -> None:
        self._client = client
        self._latencies = latencies
        self.doctor: Doctor | None = None
        """Written at the start, before ``run``."""
        self.news = LimitNews()
        self._life: Life | None = None
        self._before: deque[Moment] = deque()
        """Moments of the engines before this one."""
        self._limits: dict[float, str | None] = {}
        """Beginning of a moment -> the limit that bound in it."""
        self._num_followers = 0
        self._awake = asyncio.Event()
        self._asking: asyncio.Task[None] | None = None
        self._examining = asyncio.Lock()

    @property
    def moments(self) -> Sequence[Moment]:
        """The moments of the last minutes, of all engines."""
        return [*self._before, *(() if self._life is None else self._life.moments)]

    @property
    def report(self) -> bytes | None:
        """The doctor's latest report as JSON."""
        return self.news.report

    def limit_at(self, at: float) -> str | None:
        """The limit that bound in the moment that began then, if it is known."""
        return self._limits.get(at)

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Ask the engine every second in this block."""
        self._num_followers += 1
        self._awake.set()
        try:
            yield
        finally:
            self._num_followers -= 1

    async def run(self) -> None:
        """Watch until cancelled."""
        client, num_submitted = self._client, 0
        busy_at = examined_at = float("-inf")
        while True:
            await self._sleep()
            now = time.monotonic()
            if client.num_open > 0 or client.num_submitted > num_submitted:
                busy_at = now
            elif now - busy_at >= REST_S:
                self.news.rest()
            num_submitted = client.num_submitted
            is_due = busy_at == now and now - examined_at >= EXAMINE_S
            examined_at = now if is_due else examined_at
            if busy_at == now or self._num_followers:
                try:
                    await self._round(judges=is_due)
                except Exception:
                    logger.exception("The watch failed; the server goes on without its doctor.")

    async def _sleep(self) -> None:
        self._awake.clear()
        try:
            async with asyncio.timeout(FOLLOWED_S if self._num_followers else LOOK_S):
                await self._awake.wait()
        except TimeoutError:
            return

    async def _round(self, *, judges: bool) -> None:
        await self.look()
        if judges and self.doctor is not None and self._life is not None:
            life, moments = self._life, self._life.last(WINDOW_S)
            found = await asyncio.to_thread(self.doctor.examine, life, moments)
            self.news.take(found, time.monotonic())

    async def look(self) -> None:
        """Ask the engine for the moments that it has finished since it was last asked. An engine
        that does not answer leaves those of before. Whoever comes while it is being asked waits for
        the same answer."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        await asyncio.shield(self._asking)

    async def _ask(self) -> None:
        life = self._present_life()
        if life is None:
            return
        try:
            answer = await life.line.get_moments(life.next, timeout_s=ANSWER_S)
        except (EngineDeadError, RequestError) as error:
            life.silence = str(error)
            return
        life.silence = ""
        self._take(life, answer)

    async def examine(self, seconds: float) -> tuple[Diagnosis, list[Moment], Life] | None:
        """What the doctor says now about the last ``seconds`` of the latest engine's life, the
        moments of that time, and the life. None if there is no doctor, or has been no engine."""
        await self.look()
        if self.doctor is None or self._life is None:
            return None
        async with self._examining:  # many questions at once leave the other threads to others
            life, moments = self._life, self._life.last(seconds)
            return await asyncio.to_thread(self.doctor.examine, life, moments), moments, life

    def _present_life(self) -> Life | None:
        line, life = self._client.line, self._life
        if line is None or (life is not None and life.line is line):
            return life
        if life is not None:
            self._before.extend(life.moments)
        self._life = Life(line)
        return self._life

    def _take(self, life: Life, answer: Moments) -> None:
        moments = answer.moments
        life.next = answer.first + len(moments)
        for moment in moments:
            seen = self._latencies.quantiles(moment.at, moment.seconds)
            moment.quantiles = {**moment.quantiles, **seen}
        life.moments.extend(moments)
        if self.doctor is not None:
            limits = self.doctor.limits_of(life, moments)
            self._limits.update(zip((moment.at for moment in moments), limits, strict=True))
        if moments:
            oldest = moments[-1].at + moments[-1].seconds - KEPT_S
            for kept in (self._before, life.moments):
                while kept and kept[0].at + kept[0].seconds < oldest:
                    self._limits.pop(kept.popleft().at, None)
