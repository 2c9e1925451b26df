"""Launched engines on an event loop: their lines, their watchers, the engines that take the place
of dead ones, and the service that sends them requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from setpoint.launch.engine import Launched
from setpoint.launch.phases import Phases
from setpoint.launch.process import EngineProcess, StartupError, kill_with_children, watch

if TYPE_CHECKING:
    from setpoint.frontend.service import Service
    from setpoint.frontend.storage.storage import Storage
    from setpoint.ipc.client import EngineClient
    from setpoint.ipc.line import EngineLine
    from setpoint.launch.job import EngineJob
    from setpoint.launch.live import LiveConfig

logger = logging.getLogger(__name__)

READY_TIMEOUT_S = 600.0
EXIT_S = 10.0
"""How long the processes may take to end after they have been asked to, unless it is said
otherwise."""
HOUR_S = 3600.0
RETRY_S = 1.0
"""Pause before the next engine, if the one before could not start."""
MOVE_S = 3.0
"""Longest pause before the next engine while another one computes the requests of the dead one: its
start would take the cores from them."""
LOOK_S = 0.02
"""How often it is seen whether they go on."""
STANDBY_LOOK_S = 0.25
"""How often it is seen to that there is a standby, and that it is like the engine that serves."""
STANDBY_RETRY_S = 60.0
"""Pause before the next standby, if the one before could not start."""


@dataclass(slots=True)
class _Engine:
    """An engine process and its present life."""

    process: EngineProcess
    line: EngineLine
    watching: asyncio.Task[None] | None = None
    """Done when the process has ended; None until its line has an owner."""
    made_from: tuple[object, object] = (None, None)
    """The configuration and the checkpoint of its job."""


class EngineSession:
    """Launched engines on a running event loop: an async context manager whose exit ends them in
    order. An engine that dies is started again (--max-engine-restarts)."""

    def __init__(self, engine: Launched, phases: Phases, *, storage: Storage | None = None) -> None:
        """storage: where the service keeps clients' files, if anywhere."""
        from setpoint.ipc.balance import make_balance
        from setpoint.ipc.client import EngineClient

        parallel = engine.served.config.options.parallel
        self.engine = engine
        self.client: EngineClient = EngineClient(
            balance=make_balance(parallel.load_balance_method) if parallel.dp_size > 1 else None,
            recovers=True,
        )
        self.exit_s = EXIT_S
        """How long the processes may take to end after they have been asked to."""
        self.death = ""
        """Why there is no engine any more."""
        self._phases = phases
        self._storage = storage
        self._service: Service | None = None
        self._live: LiveConfig | None = None
        self._most_restarts = parallel.max_engine_restarts
        self._restarts: deque[float] = deque()
        """When engines were started again, by time.monotonic(); of the last hour."""
        self._lives = [0] * len(engine.processes)
        """How many engines each rank has had before its present one."""
        self._was_ready = [asyncio.Event() for _ in engine.processes]
        """By rank: whether it has ever had an engine that took requests."""
        self._is_ending = False
        self._has_standby = parallel.engine_standby
        self._standby: _Engine | None = None
        self._standby_keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> EngineSession:
        keepers = [self._keep(rank) for rank in range(len(self.engine.processes))]
        self.over: asyncio.Task[None] = asyncio.create_task(_all(keepers))
        """Done when no engine is left and none comes."""
        if self._has_standby:
            self._standby_keeper = asyncio.create_task(self._keep_standby())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()
        if self._standby_keeper is not None:
            self._standby_keeper.cancel()
            await asyncio.gather(self._standby_keeper, return_exceptions=True)
        self._end_standby()
        await asyncio.wait([self.over], timeout=self.exit_s)
        self.kill()
        await self.over
        self.client.close()

    async def service_unless(self, called_off: asyncio.Future[Any]) -> Service | None:
        """Like ``service``; if ``called_off`` is done first, the engines are killed and None is
        returned."""
        starting = asyncio.create_task(self.service())
        await asyncio.wait([starting, called_off], return_when=asyncio.FIRST_COMPLETED)
        if called_off.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            self.kill()
            return None
        return starting.result()

    def shutdown(self) -> None:
        """Ask the engines to end; none takes their place. Open requests fail."""
        self._is_ending = True
        self.client.shutdown()

    def kill(self) -> None:
        """End the processes at once; the only way while they are loading and read no messages."""
        self.shutdown()
        if self._standby is not None:
            self._standby.line.shutdown()
            kill_with_children(self._standby.process.popen)
        for process in self.engine.processes:
            kill_with_children(process.popen)

    async def service(self) -> Service:
        """Wait until an engine can take requests, and for the others as long as that took again.
        Raises StartupError if none can start."""
        from setpoint.config.live import Running
        from setpoint.launch.assembly import make_service
        from setpoint.launch.live import LiveConfig

        self._phases.mark("HTTP")
        started = time.monotonic()
        ready: list[asyncio.Future[Any]] = [
            asyncio.create_task(each.wait()) for each in self._was_ready
        ]
        try:
            over: asyncio.Future[Any] = asyncio.shield(self.over)
            await asyncio.wait({*ready, over}, return_when=asyncio.FIRST_COMPLETED)
            took_s = time.monotonic() - started
            if not over.done():
                await asyncio.wait(ready, timeout=max(took_s, 1.0))
        finally:
            for task in ready:
                task.cancel()
        if not self.client.is_ready:
            raise StartupError(self.death)
        self.engine.waiting.end()
        self._phases.mark("waiting for the engine")
        startup_s = sum(self._phases.seconds.values())
        facts, served = self.client.choose().facts, self.engine.served
        running = Running.started(served.asked, served.config, facts.max_total_num_tokens)
        self._live = LiveConfig(running)
        self._service = make_service(
            self.engine,
            self.client,
            facts,
            self._live,
            startup_s=startup_s,
            storage=self._storage,
        )
        return self._service

    async def _keep(self, rank: int) -> None:
        """Have the rank an engine as long as that is allowed."""
        engine = self._engine(rank, self.engine.processes[rank])
        while True:
            line = engine.line
            self.client.attach(line)
            starting = asyncio.create_task(self._start(line, engine.process))
            await (engine.watching or self._watching(engine))
            starting.cancel()
            line.close()
            why_not = self._why_not_again(line)
            if why_not is not None:
                break
            if not line.was_ready:
                await asyncio.sleep(RETRY_S)
                if self._is_ending:
                    why_not = line.death
                    break
            await self._moved_requests_go_on()
            engine = self._next(line)
        self.death = why_not
        self.client.lost(rank, why_not)
        if not (self._is_ending or self.client.has_ended):
            logger.error("Engine %d is given up, and the others serve: %s", rank, why_not)

    async def _moved_requests_go_on(self) -> None:
        """Wait until the requests that have moved to another engine get tokens again, unless some
        wait for an engine themselves."""
        client, end = self.client, time.monotonic() + MOVE_S
        while client.is_ready and client.num_recomputed and not client.num_waiting:
            if time.monotonic() > end:
                break
            await asyncio.sleep(LOOK_S)

    def _watching(self, engine: _Engine) -> asyncio.Task[None]:
        watchdog_s = self.engine.served.config.options.server.watchdog_timeout
        return asyncio.create_task(watch(engine.process.popen, engine.line, watchdog_s=watchdog_s))

    async def _keep_standby(self) -> None:
        """Have a second engine ready to take the place of the first, until cancelled."""
        await self._was_ready[0].wait()
        while True:
            standby = self._standby
            if standby is None:
                if self.client.is_ready:
                    try:
                        self._standby = self._start_standby()
                    except (OSError, StartupError) as error:
                        logger.warning("A standby engine cannot be started: %s", error)
                        await asyncio.sleep(STANDBY_RETRY_S)
            elif standby.line.has_ended:
                self._end_standby()
                logger.warning("The standby engine has ended: %s", standby.line.death)
                await asyncio.sleep(RETRY_S if standby.line.was_ready else STANDBY_RETRY_S)
            elif standby.made_from != self._present_job:
                logger.info("The standby engine is replaced: options or weights have changed.")
                self._end_standby()
            elif standby.line.is_ready and self.client.standby != "ready":
                self.client.standby = "ready"
                logger.info("The standby engine is ready.")
            await asyncio.sleep(STANDBY_LOOK_S)

    def _start_standby(self) -> _Engine:
        (line,) = self.client.lines
        self._lives[0] += 1
        process = self.engine.start_another(0, self._job(line, is_standby=True))
        engine = self._engine(0, process)
        engine.made_from = self._present_job
        engine.line.start(_ignore, _ignore, _ignore, _ignore)
        engine.watching = self._watching(engine)
        self.client.standby = "starting"
        return engine

    def _end_standby(self) -> None:
        if self._standby is not None:
            self._standby.line.shutdown()
            self._standby.line.close()
            self._standby.process.end()
        self._standby = self.client.standby = None

    @property
    def _present_job(self) -> tuple[object, object]:
        """What the job of an engine that started now would be made from."""
        config = self.engine.served.config if self._live is None else self._live.config
        return config, None if self._service is None else self._service.checkpoint

    def _engine(self, rank: int, process: EngineProcess) -> _Engine:
        from setpoint.ipc.line import EngineLine
        from setpoint.ipc.link import SocketLink

        doing = self.engine.waiting.doing
        return _Engine(process, EngineLine(SocketLink(process.link), rank=rank, on_progress=doing))

    async def _start(self, line: EngineLine, process: EngineProcess) -> None:
        """Wait until the engine takes requests, and end it if that takes too long."""
        started = time.monotonic()
        if await line.wait_ready(timeout_s=READY_TIMEOUT_S):
            if self._lives[line.rank]:
                logger.info(
                    "Engine %d is ready again after %.1f s.", line.rank, time.monotonic() - started
                )
            elif self._service is not None:
                logger.info("Engine %d is ready, too.", line.rank)
            self._was_ready[line.rank].set()
        elif not line.has_ended:
            line.died(f"The engine was not ready after {READY_TIMEOUT_S:g} s.")
            kill_with_children(process.popen)

    def _why_not_again(self, line: EngineLine) -> str | None:
        """Why no other engine takes the place of one that has ended; None if one does."""
        if self._is_ending:
            return line.death
        if not self._was_ready[line.rank].is_set():
            return f"It could not start: {line.death}" if line.failed is None else line.death
        now = time.monotonic()
        while self._restarts and now - self._restarts[0] > HOUR_S:
            self._restarts.popleft()
        if len(self._restarts) >= self._most_restarts:
            most = self._most_restarts
            return f"{line.death} It is not started again: --max-engine-restarts is {most} an hour."
        self._restarts.append(now)
        return None

    def _next(self, line: EngineLine) -> _Engine:
        """The engine in the place of one that has ended: the standby, if it is there and has the
        options and weights of now, and otherwise a new one."""
        rank, standby = line.rank, self._standby
        count = (
            f"({len(self._restarts)} of at most {self._most_restarts} in an hour);"
            f" {self.client.num_open} requests go on."
        )
        is_usable = standby is not None and standby.made_from == self._present_job
        if standby is not None and is_usable and not standby.line.has_ended:
            logger.warning("The standby takes the place of engine %d %s", rank, count)
            self._standby = self.client.standby = None
            self.engine.replace(rank, standby.process)
            return standby
        self._lives[rank] += 1
        logger.warning("Engine %d is started again %s", rank, count)
        return self._engine(rank, self.engine.start_again(rank, self._job(line)))

    def _job(self, before: EngineLine, *, is_standby: bool = False) -> Callable[[int], EngineJob]:
        """Makes the job of the engine in the place of another: its live options are those of now,
        its weights those of now, and its pool is no larger than that of the one before."""
        served, live, service = self.engine.served, self._live, self._service
        config = served.config if live is None else live.config
        if before.was_ready:
            num_tokens = before.facts.max_total_num_tokens
            config = replace(config, options=config.options.replace(max_total_tokens=num_tokens))
        return partial(
            served.job,
            rank=before.rank,
            life=self._lives[before.rank],
            config=config,
            checkpoint=None if service is None else service.checkpoint,
            is_standby=is_standby,
        )


def _ignore(*_: object) -> None:
    """A standby has no requests."""


async def _all(keepers: list[Any]) -> None:
    await asyncio.gather(*keepers)
