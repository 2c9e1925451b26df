"""Launched engines on an event loop: their lines, their watchers, the engines that take the place
of dead ones, and the service that sends them requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
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

    async def __aenter__(self) -> EngineSession:
        keepers = [self._keep(rank) for rank in range(len(self.engine.processes))]
        self.over: asyncio.Task[None] = asyncio.create_task(_all(keepers))
        """Done when no engine is left and none comes."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_ending = True
        self.client.shutdown()
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

    def kill(self) -> None:
        """End the processes at once; the only way while they are loading and read no messages."""
        self._is_ending = True
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
        process = self.engine.processes[rank]
        while True:
            line = self._attach(rank, process)
            starting = asyncio.create_task(self._start(line, process))
            watchdog_s = self.engine.served.config.options.server.watchdog_timeout
            await watch(process.popen, line, watchdog_s=watchdog_s)
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
            process = self._start_again(line)
        self.death = why_not
        self.client.lost(rank, why_not)
        if not (self._is_ending or self.client.has_ended):
            logger.error("Engine %d is given up, and the others serve: %s", rank, why_not)

    def _attach(self, rank: int, process: EngineProcess) -> EngineLine:
        from setpoint.ipc.line import EngineLine
        from setpoint.ipc.link import SocketLink

        waiting = self.engine.waiting
        line = EngineLine(SocketLink(process.link), rank=rank, on_progress=waiting.doing)
        self.client.attach(line)
        return line

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

    def _start_again(self, line: EngineLine) -> EngineProcess:
        rank = line.rank
        self._lives[rank] += 1
        logger.warning(
            "Engine %d is started again (%d of at most %d in an hour); %d requests go on.",
            rank,
            len(self._restarts),
            self._most_restarts,
            self.client.num_open,
        )
        return self.engine.start_again(rank, self._job(line))

    def _job(self, before: EngineLine) -> Callable[[int], EngineJob]:
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
        )


async def _all(keepers: list[Any]) -> None:
    await asyncio.gather(*keepers)
