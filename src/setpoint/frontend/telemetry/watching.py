"""Watches the engines: keeps the moments of the last minutes, of each and of all together, and what
a doctor says about them. The doctor is injected, because nothing here knows how to judge.

The engines are not asked while no request is open and nobody follows. One that ends leaves its
moments; those of the next one come after a gap.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from setpoint.core.control import TierState
from setpoint.core.errors import EngineDeadError, RequestError
from setpoint.core.moments import Moment, add_up, has_steps
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
LATE_S = 10.0
"""An engine is no longer waited for when its last moment ended so many seconds ago."""
REST_S = 30.0
"""After this time without requests no limit binds."""


@dataclass(slots=True)
class WatchedEngine:
    """What is known of one engine."""

    line: EngineLine
    moments: deque[Moment] = field(default_factory=deque)
    """The moments of the last minutes, in the order of time."""
    next: int = 0
    """Number of the first moment that the engine has not told yet."""
    tiers: TierState | None = None
    """What its cache tiers have done; None without any."""
    silence: str = ""
    """Why the engine did not answer when it was last asked; "" if it did."""

    @property
    def death(self) -> str:
        """Why the engine has ended; "" if it has not."""
        return self.line.life.death

    def last(self, seconds: float) -> list[Moment]:
        """The moments that ended in the last ``seconds`` before the end of the last one."""
        return _last(self.moments, seconds)


@dataclass(slots=True)
class Lane:
    """The moments of the last minutes, of one rank or of the whole server, whatever engines it has
    had meanwhile."""

    moments: deque[Moment] = field(default_factory=deque)
    """The moments in the order of time."""
    limits: dict[float, str | None] = field(default_factory=dict)
    """Beginning of a moment -> the limit that bound in it, if it is known."""

    def add(self, moments: Sequence[Moment], limits: Iterable[str | None]) -> None:
        self.moments.extend(moments)
        self.limits.update(zip((moment.at for moment in moments), limits, strict=False))
        while self.moments and _end(self.moments[0]) < _end(self.moments[-1]) - KEPT_S:
            self.limits.pop(self.moments.popleft().at, None)


def _end(moment: Moment) -> float:
    return moment.at + moment.seconds


Seen = Sequence[tuple[WatchedEngine, Sequence[Moment]]]
"""Engines, in the order of ranks, and some of the moments of each."""


@dataclass(slots=True, frozen=True)
class Examined:
    """What ``Watch.examine`` has found."""

    diagnosis: Diagnosis
    moments: Sequence[Moment]
    """The moments that the diagnosis is about; with several engines, what they did together."""
    lives: Sequence[WatchedEngine]


class Doctor(Protocol):
    def examine(self, seen: Seen) -> Diagnosis:
        """Judge these moments of a server's engines. Called in a thread."""
        ...

    def limits_of(self, life: WatchedEngine, moments: Sequence[Moment]) -> list[str | None]:
        """The limit that binds in each of these moments; None for a moment whose limit is
        unknown."""
        ...


class Watch:
    def __init__(
        self, client: EngineClient, latencies: Latencies, doctor: Doctor | None = None
    ) -> None:
        self._client = client
        self._latencies = latencies
        self.doctor = doctor
        self.news = LimitNews()
        self.lanes: dict[int | None, Lane] = {None: Lane()}
        """None: the whole server; and one for each rank, if there are several."""
        self._lives: dict[int, WatchedEngine] = {}
        """Rank -> its latest engine."""
        self._num_followers = 0
        self._awake = asyncio.Event()
        self._asking: asyncio.Task[None] | None = None
        self._examining = asyncio.Lock()

    @property
    def report(self) -> bytes | None:
        """The doctor's latest report as JSON."""
        return self.news.report

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Ask the engines every second in this block."""
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
        if judges and self.doctor is not None and self._lives:
            found = await asyncio.to_thread(self.doctor.examine, self._seen(WINDOW_S, None))
            self.news.take(found, time.monotonic())

    def _seen(self, seconds: float, rank: int | None) -> Seen:
        lives = [self._lives[each] for each in sorted(self._lives) if rank in (None, each)]
        return [(life, life.last(seconds)) for life in lives]

    async def look(self) -> None:
        """Ask the engines for the moments that they have finished since they were last asked. An
        engine that does not answer leaves those of before. Whoever comes while they are being asked
        waits for the same answers."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_all())
        await asyncio.shield(self._asking)

    async def examine(self, seconds: float, rank: int | None = None) -> Examined | None:
        """What the doctor says now about the last ``seconds`` of the latest engine of this rank, or
        of all. None if there is no doctor, or has been no engine."""
        await self.look()
        seen = self._seen(seconds, rank)
        if self.doctor is None or not seen:
            return None
        async with self._examining:  # many questions at once leave the other threads to others
            diagnosis = await asyncio.to_thread(self.doctor.examine, seen)
        moments = seen[0][1] if len(seen) == 1 else _last(self.lanes[None].moments, seconds)
        return Examined(diagnosis, moments, [life for life, _ in seen])

    async def _ask_all(self) -> None:
        for line in self._client.lines:
            life = self._lives.get(line.rank)
            # One that is loading is not known yet; until it is ready, the one before is the latest.
            if line.life.facts and (life is None or life.line is not line):
                self._lives[line.rank] = WatchedEngine(line)
        await asyncio.gather(*map(self._ask, self._lives.values()))
        if len(self._lives) > 1:
            self._add_up()

    async def _ask(self, life: WatchedEngine) -> None:
        try:
            answer = await life.line.get_moments(life.next, timeout_s=ANSWER_S)
        except (EngineDeadError, RequestError) as error:
            life.silence = str(error)
            return
        life.silence, life.tiers = "", answer.tiers
        life.next = answer.first + len(answer.moments)
        before = life.moments[-1] if life.moments else None
        life.moments.extend(answer.moments)
        while life.moments and _end(life.moments[0]) < _end(life.moments[-1]) - KEPT_S:
            life.moments.popleft()
        is_alone = len(self._lives) == 1
        if is_alone:
            self._add_latencies(answer.moments, before=before)
        limits = self.doctor.limits_of(life, answer.moments) if self.doctor is not None else ()
        lane = self.lanes.setdefault(None if is_alone else life.line.rank, Lane())
        lane.add(answer.moments, limits)

    def _add_latencies(self, moments: Sequence[Moment], *, before: Moment | None) -> None:
        """Add the clients' latencies to an engine's moments, of which ``before`` is the previous
        one. They are those of the whole server: who gets tokens does not know from which engine.

        They are known by the second, and a time without steps, in which no token comes, begins and
        ends within one. So its first half belongs to the moment before it, and its second half to
        the one after it.
        """
        around = [before, *moments, None]
        for place, moment in enumerate(moments):
            if not has_steps(moment):
                continue
            earlier, later = around[place], around[place + 2]
            begin, end = moment.at, _end(moment)
            if earlier is not None and not has_steps(earlier):
                begin = earlier.at + earlier.seconds / 2
            if later is not None and not has_steps(later):
                end = later.at + later.seconds / 2
            self._add_seen(moment, begin, end)

    def _add_seen(self, moment: Moment, begin: float, end: float) -> None:
        seen = self._latencies.quantiles(begin, end - begin)
        moment.quantiles = {**moment.quantiles, **seen}

    def _add_up(self) -> None:
        """Go on with what the engines did together, as far as all have told."""
        lanes = [lane for rank, lane in self.lanes.items() if rank is not None and lane.moments]
        if not lanes:
            return
        whole, now = self.lanes[None], time.time()
        told = [
            _end(life.moments[-1])
            for life in self._lives.values()
            if life.moments and not life.line.life.has_ended
        ]
        until = min((end for end in told if now - end < LATE_S), default=now - LATE_S)
        first = min(lane.moments[0].at for lane in lanes)
        if whole.moments:
            first = max(_end(whole.moments[-1]), first)
        for second in range(math.floor(max(first, until - KEPT_S)), math.floor(until)):
            total = add_up([lane.moments for lane in lanes], second)
            if total is not None:
                self._add_seen(total, total.at, _end(total))
                whole.add([total], [_limit_in(lanes, second)])


def _limit_in(lanes: Iterable[Lane], second: int) -> str | None:
    """A limit that bound on an engine in that second."""
    found = (
        limit
        for lane in lanes
        for at, limit in reversed(lane.limits.items())
        if second <= at < second + 1 and limit is not None
    )
    return next(found, None)


def _last(moments: Sequence[Moment], seconds: float) -> list[Moment]:
    """The moments that ended in the last ``seconds`` before the end of the last one."""
    since = _end(moments[-1]) - seconds if moments else 0.0
    return [moment for moment in moments if _end(moment) > since]
