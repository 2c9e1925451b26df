"""Simulated runs in which operators give orders of every kind while engines are killed, are born, are
stopped by signals and refuse. Whatever an order meets: afterwards every engine that serves is as the
last order says, also one that was not there. An order that open requests stand in the way of changes no
engine.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from setpoint.core.control import PauseMode
from setpoint.core.errors import EngineDeadError, RequestError
from setpoint.core.operations import (
    AttachStorage,
    DetachStorage,
    MemoryPart,
    StartProfile,
    StopProfile,
)
from setpoint.frontend.checkpoint_names import Checkpoint
from setpoint.frontend.participants import Participants
from setpoint_testing.simulation.clients import draw_orders
from setpoint_testing.simulation.engine import SimulatedEngine
from setpoint_testing.simulation.run import Plan, Report, Run, alone, judge
from setpoint_testing.simulation.world import Setting, options_of

NUM_REQUESTS = 6
BUSY_S = 3.0
REFUSED = (EngineDeadError, RequestError)


@dataclass
class LastOrders:
    """What an operator who notes the answers expects."""

    pauses: dict[int, PauseMode] = field(default_factory=dict)
    storage: str | None = None
    released: frozenset[MemoryPart] = frozenset()


def operator_plan_of(seed: int) -> Plan:
    rng = random.Random(f"operators {seed}")
    ranks = rng.choice([1, 2, 2, 2, 3])
    options = options_of(
        {
            "dp_size": ranks,
            "engine_standby": ranks == 1 and rng.random() < 0.4,
            "max_engine_restarts": 1000,
            "watchdog_timeout": 5.0,
            "max_total_tokens": 256,
            "max_running_requests": rng.randrange(1, 7),
            "random_seed": 0,
        }
    )
    setting = Setting.drawn(options, rng, [0, 1])
    return Plan(
        seed,
        setting,
        list(draw_orders(rng, NUM_REQUESTS, seconds=BUSY_S, ranks=ranks)),
        num_faults=rng.choice([0, 1, 3]),
        with_engine_faults=False,
        num_operators=rng.randrange(1, 7),
    )


class OperatorRun(Run):
    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._last = LastOrders()
        self._pausing, self._storing, self._profiling = (
            asyncio.Lock(),
            asyncio.Lock(),
            asyncio.Lock(),
        )
        self._num_busy = 0
        self._folders = count()
        self._must_end: set[int] = set()
        """Numbers of the requests that a pause has ended."""

    def _events(self) -> list[Coroutine[Any, Any, None]]:
        rng = self.rng
        faults: list[Callable[[], None]] = [self._kill, self._stop, self._next_start, self._slow]
        faults.append(self._refuse)
        orders = [
            *(self._pause, self._pause, self._resume, self._update, self._update, self._change),
            *(self._release, self._give_back, self._attach, self._detach, self._profile),
            *(self._replace, self._flush),
        ]
        self._num_busy = self.plan.num_operators
        events = [
            self._later(rng.uniform(0, BUSY_S), rng.choice(faults))
            for _ in range(self.plan.num_faults)
        ]
        events += [
            self._order(rng.uniform(0, BUSY_S), rng.choice(orders))
            for _ in range(self.plan.num_operators)
        ]
        return [*events, self._end_orders()]

    async def _order(self, seconds: float, act: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """An order, often just after an engine has been killed, or just before."""
        rng = self.rng
        try:
            await asyncio.sleep(seconds)
            if rng.random() < 0.6:
                self._kill()
                await asyncio.sleep(rng.choice([0.0, rng.uniform(0, 0.1), rng.uniform(0, 1.5)]))
            if rng.random() < 0.5:
                self.world.loop.call_later(rng.uniform(0, 0.1), self._kill)
            await self._operate(0.0, act)
        finally:
            self._num_busy -= 1

    def _refuse(self) -> None:
        if (engine := self._some("refusing")) is not None:
            engine.operator.refuses_next = True

    # ------------------------------------------------------------------ orders

    def _note(self, what: str) -> None:
        self.world.note("operator", what)

    async def _pause(self) -> None:
        orders, mode = self.service.engine.orders, self.rng.choice(list(PauseMode))
        ranks = self.rng.choice([None, None, [self._some_rank()]])
        async with self._pausing:
            self.seen[f"pause {mode}"] += 1
            self._note(f"pauses {ranks or 'all'} ({mode})")
            running = set(self.service.engine._open)
            await orders.pause(mode, ranks)
            self._note("has paused")
            chosen = self.service.engine.ranks if ranks is None else ranks
            self._last.pauses |= dict.fromkeys(chosen, mode)
            if mode is PauseMode.ABORT and ranks is None:
                self._must_end |= running

    async def _resume(self) -> None:
        async with self._pausing:
            self.seen["resumes"] += 1
            self._note("resumes all")
            self._last.pauses.clear()
            await self.service.engine.orders.resume()

    async def _update(self) -> None:
        folder, aborts = f"weights {next(self._folders)}", self.rng.random() < 0.6
        keep_pause = aborts and self.rng.random() < 0.2
        self.seen["updates that abort" if aborts else "updates"] += 1
        if aborts:
            self.seen["pause abort"] += 1
        async with self.loading:
            if not aborts:
                await self._until_busy()
            self._note(f"loads {folder}{' and aborts' * aborts}{' and pauses' * keep_pause}")
            running = set(self.service.engine._open)
            async with self._pausing if keep_pause else nullcontext():
                with self._all_or_none(lambda engine: folder in engine.operator.loaded):
                    await self.service.weights.load(
                        Checkpoint(folder, "dummy"),
                        flush_cache=True,
                        aborts=aborts,
                        keep_pause=keep_pause,
                    )
                if keep_pause:
                    kept = dict.fromkeys(self.service.engine.ranks, PauseMode.ABORT)
                    self._last.pauses = kept | self._last.pauses
            self._note(f"has loaded {folder}")
            self._last.released -= {MemoryPart.WEIGHTS}
            if aborts:
                self._must_end |= running

    async def _until_busy(self) -> None:
        """Often, wait until an engine has a request, but not for ever."""
        if self.rng.random() < 0.5:
            for _ in range(100):
                if self.service.engine._sent:
                    break
                await asyncio.sleep(0.01)

    @contextmanager
    def _all_or_none(self, is_changed: Callable[[SimulatedEngine], bool]) -> Iterator[None]:
        """An order for which engines must be at rest, and which changes none if one is not."""
        try:
            yield
        except RequestError as error:
            if "not idle" in error.message or "memory in the KV cache" in error.message:
                self.seen["refused for requests"] += 1
                changed = [each.pid for each in self.world.serving() if is_changed(each)]
                if changed:
                    self.world.wrong.append(f"{changed} did what another refused: {error}")
            raise

    async def _release(self) -> None:
        parts = {MemoryPart.KV_CACHE}
        if self.rng.random() < 0.5:
            parts.add(MemoryPart.WEIGHTS)
        async with self.loading:
            await self._until_busy()
            self.seen["releases"] += 1
            self._note(f"releases {sorted(parts)}")
            before = {each: each.operator.num_releases for each in self.world.serving()}
            with self._all_or_none(lambda x: x.operator.num_releases > before.get(x, 0)):
                await self.service.engine.orders.release(sorted(parts))
            self._note("has released")
            self._last.released |= parts

    async def _give_back(self) -> None:
        async with self.loading:
            self.seen["restores"] += 1
            self._note("restores")
            await self.service.engine.orders.restore(sorted(self._last.released))
            self._last.released = frozenset()

    async def _attach(self) -> None:
        async with self._storing:
            self.seen["attaches"] += 1
            backend = self.rng.choice(["file", "redis"])
            self._note(f"attaches {backend}")
            await self.service.engine.orders.use_storage(AttachStorage(backend, ""))
            self._last.storage = backend

    async def _detach(self) -> None:
        async with self._storing:
            self.seen["detaches"] += 1
            self._note("detaches")
            await self.service.engine.orders.use_storage(DetachStorage())
            self._last.storage = None

    async def _profile(self) -> None:
        """A refusal leaves no profile behind, and what has begun can be ended."""
        async with self._profiling:
            self.seen["profiles"] += 1
            profiled = Participants(self.service.engine)
            await profiled.begin(
                lambda line: line.operate(StartProfile("profile")),
                undo=lambda line: line.operate(StopProfile()),
            )
            await asyncio.sleep(self.rng.uniform(0, 1))
            for _ in range(2):  # an engine may refuse once
                with suppress(*REFUSED):
                    await profiled.on_all(lambda line: line.operate(StopProfile()))

    # ------------------------------------------------------------------ what must hold

    async def _end_orders(self) -> None:
        """Once nothing changes any more, every engine is as the last order says. Then end all that
        keeps requests waiting."""
        client, wrong = self.service.engine, self.world.wrong
        seconds_at_rest = 0
        while seconds_at_rest < 5:
            rests = all(each.state in ("ready", "ended") for each in client.standings())
            rests = rests and not self._num_busy
            seconds_at_rest = seconds_at_rest + 1 if rests else 0
            await asyncio.sleep(1.0)
        for line in client.lines:
            if line.life.is_ready:
                with suppress(EngineDeadError):
                    state = await line.get_state()
                    wanted = self._last.pauses.get(line.rank)
                    if state.paused != wanted:
                        wrong.append(f"engine {line.rank}: paused is {state.paused}, not {wanted}")
                    if set(state.released) != self._last.released:
                        wrong.append(f"engine {line.rank}: {state.released} is released")
        for engine in self.world.serving():
            if engine.operator.storage != self._last.storage:
                wrong.append(f"engine {engine.pid} has the storage {engine.operator.storage}")
            if engine.operator.is_profiled:
                wrong.append(f"engine {engine.pid} is profiled for ever")
            engine.operator.refuses_next = False
        if left := self._must_end.intersection(client._open):
            wrong.append(f"{len(left)} requests go on that a pause has ended")
        self._note("resumes all at the end")
        await client.orders.resume()
        if self._last.released:
            await self._restore(sorted(self._last.released))


def simulate_operators(seed: int) -> Report:
    """Run a seed and judge it; ``Report.wrong`` is empty if all went well."""
    plan = operator_plan_of(seed)
    return judge(OperatorRun(plan), alone(plan))
