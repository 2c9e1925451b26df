"""Runs launched engines on an event loop: connects to them, watches them, replaces dead ones,
carries out the operator's instructions, and makes the service that sends them requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from setpoint.core.awake import CLOCK
from setpoint.core.errors import RequestError
from setpoint.ipc.engine_life import EngineLife, EngineLives, EngineState, RestartBudget, Successor
from setpoint.launch.parent.engine import Launched
from setpoint.launch.parent.launched_engine import LaunchedEngine
from setpoint.launch.parent.phases import Phases
from setpoint.launch.parent.process import EngineProcess, StartupError
from setpoint.launch.parent.standby import Standby

if TYPE_CHECKING:
    from setpoint.core.executor import Clock
    from setpoint.frontend.composition import ServerParts
    from setpoint.frontend.residence import Residence
    from setpoint.frontend.service import Service
    from setpoint.ipc.block_sink import BlockSink
    from setpoint.ipc.client import EngineClient
    from setpoint.ipc.line import EngineLine
    from setpoint.launch.job import EngineJob
    from setpoint.launch.parent.live_config import LiveConfig

logger = logging.getLogger(__name__)

READY_TIMEOUT_S = 600.0
EXIT_S = 10.0
"""How long the processes may take by default to end after they have been asked to."""
RETRY_S = 1.0
"""Pause before the next engine after one that could not start."""
MOVE_S = 3.0
"""Longest pause before the next engine while another engine computes the requests of the dead one,
because a start would take cores from them."""
LOOK_S = 0.02
"""Interval of checking whether these requests have continued."""
OUT = "The engine was taken out of service (scale_down)."


class EngineSession:
    """Launched engines on a running event loop; an async context manager whose exit ends them in
    order. ``EngineLives`` decides what follows an engine that dies (--max-engine-restarts)."""

    def __init__(
        self,
        engine: Launched,
        phases: Phases,
        *,
        of_server: ServerParts | None = None,
        blocks: BlockSink | None = None,
        clock: Clock = CLOCK,
    ) -> None:
        """of_server: what the service has in common with those of other models. blocks: see
        EngineClient. clock: the time for the engines' deadlines, and for restarts."""
        from setpoint.ipc.balance import make_balance
        from setpoint.ipc.client import EngineClient

        parallel = engine.served.config.options.parallel
        self.engine = engine
        self._lives = EngineLives(
            RestartBudget(parallel.max_engine_restarts, clock.now),
            in_step=parallel.enable_dp_attention,
        )
        self.client: EngineClient = EngineClient(
            self._lives,
            balance=make_balance(parallel.load_balance_method)
            if engine.served.tells_prefixes
            else None,
            blocks=blocks,
        )
        self.exit_s = EXIT_S
        """How long the processes may take to end after they have been asked to."""
        self.death = ""
        """Why no engine is left."""
        self._phases = phases
        self._clock = clock
        self._of_server = of_server
        self._service: Service | None = None
        self._live: LiveConfig | None = None
        self._engines: dict[int, LaunchedEngine] = {}
        """Rank -> its current or last engine."""
        self._changed = asyncio.Event()
        """Set for a moment when the engines have changed in a way for which ``_until`` waits."""
        self.may_load = asyncio.Event()
        """Whether an engine may be started; cleared while another model has the room."""
        if engine.share is None:
            self.may_load.set()
        self._standby = self._make_standby() if parallel.engine_standby else None
        self._standby_keeper: asyncio.Task[None] | None = None

    def _make_standby(self) -> Standby:
        parallel = self.engine.served.config.options.parallel
        return Standby(
            self._lives,
            RestartBudget(parallel.max_engine_restarts, self._clock.now),
            start=self._start_standby,
            present_job=self._present_job,
        )

    async def __aenter__(self) -> EngineSession:
        keepers = [
            asyncio.create_task(self._keep(rank)) for rank in range(len(self.engine.processes))
        ]
        self.over: asyncio.Task[None] = asyncio.create_task(self._until_over(keepers))
        """Done when no engine is left and none is started."""
        self.over.add_done_callback(lambda _: self._look())
        if self._standby is not None:
            self._standby_keeper = asyncio.create_task(self._keep_standby(self._standby))
        return self

    async def _until_over(self, keepers: list[asyncio.Task[None]]) -> None:
        given_up = asyncio.create_task(self._until(lambda: self._lives.is_over))
        try:
            await asyncio.wait([given_up, *keepers], return_when=asyncio.FIRST_COMPLETED)
            for keeper in keepers:
                if keeper.done():
                    keeper.result()
        finally:
            for task in (given_up, *keepers):
                task.cancel()
            await asyncio.gather(given_up, *keepers, return_exceptions=True)

    async def _until(self, holds: Callable[[], object]) -> None:
        """Wait until this holds; looks at it whenever ``_look`` is called."""
        while not holds():
            await self._changed.wait()

    def _look(self) -> None:
        """Have everybody look who waits for a change of the engines."""
        self._changed.set()
        self._changed.clear()

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
        if self._standby is not None:
            self._standby.end()
        await asyncio.wait([self.over], timeout=self.exit_s)
        self.kill()
        await self.over
        if self._standby is not None:
            await self._standby.until_gone()
        self.client.close()

    async def services_unless(self, called_off: asyncio.Future[Any]) -> tuple[Service, ...]:
        """The service alone; none, with the engines killed, if ``called_off`` is done first. Raises
        like ``service``."""
        starting = asyncio.create_task(self.service())
        await asyncio.wait([starting, called_off], return_when=asyncio.FIRST_COMPLETED)
        if called_off.done():
            starting.cancel()
            self.kill()
            return ()
        return (starting.result(),)

    def shutdown(self) -> None:
        """Ask the engines to end; they are not replaced. Open requests fail. Those that read no
        messages, because they are loading or a signal has stopped them, are killed."""
        self.may_load.set()
        deaf = [
            engine
            for engine in self._engines.values()
            if engine.line.life.is_suspended or engine.line.life.state is EngineState.STARTING
        ]
        self.client.shutdown()
        for engine in deaf:
            engine.process.kill()

    def kill(self) -> None:
        """End the processes at once; the only way while they are loading and read no messages."""
        self.shutdown()
        if self._standby is not None and self._standby.engine is not None:
            self._standby.engine.line.shutdown()
            self._standby.engine.process.kill()
        for process in self.engine.processes:
            process.kill()

    async def service(self, residence: Residence | None = None) -> Service:
        """The service, once an engine can take requests. Waits for the other engines at most as
        long again. residence: None for the only model. Raises StartupError if no engine can
        start."""
        from setpoint.config.live_changes import Running
        from setpoint.launch.parent.assembly import make_service
        from setpoint.launch.parent.live_config import LiveConfig

        self._phases.mark("HTTP")
        started = self._clock.now()
        over, num_ranks = self.over, len(self.engine.processes)
        await self._until(lambda: over.done() or self._lives.num_served)
        took_s = self._clock.now() - started
        with suppress(TimeoutError):
            async with asyncio.timeout(max(took_s, 1.0)):
                await self._until(lambda: over.done() or self._lives.num_served == num_ranks)
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
            of_server=self._of_server,
            residence=residence,
            supervisor=self,
        )
        return self._service

    def retry(self, ranks: Collection[int]) -> None:
        """Start engines for those of these ranks that have none, with as many restarts as after a
        start of the server."""
        self._lives.restarts.reset()
        if self._standby is not None:
            self._standby.try_again()
        for rank in ranks:
            # One that is being taken out of service gets its next engine when this one has ended.
            self._lives.want(rank)
        self._look()

    def scale_down(self, ranks: Collection[int]) -> None:
        """Take ranks out of service: their requests continue on the other engines, and their
        engines end. Raises RequestError if no engine that takes requests would be left."""
        if self._lives.in_step:
            raise RequestError(
                "With --enable-dp-attention, the engines compute in step, and none can be taken out"
                " of service alone. End the server instead."
            )
        paused = self.client.orders.paused
        ready = {line.rank for line in self.client.ready()}
        left = ready - set(ranks)
        if not left:
            raise RequestError(
                "No engine that takes requests would be left. End the server instead, or wait"
                " until another engine is ready."
            )
        # If all engines are paused now, all requests wait already.
        if left <= paused.keys() and not ready <= paused.keys():
            raise RequestError(
                "The engines that would be left are paused, so all requests would wait. End their"
                " pause first (retry)."
            )
        for rank in set(ranks):
            engine = self._engines[rank]
            life = engine.line.life
            if not life.is_retired:
                # An engine that is loading reads no messages.
                ends_in_s = self.exit_s if life.is_ready else 0.0
                logger.warning("Engine %d is taken out of service (scale_down).", rank)
                asyncio.get_running_loop().call_later(ends_in_s, engine.process.kill)
            self.client.retire(rank, OUT)

    async def _keep(self, rank: int) -> None:
        """Keep an engine running for the rank as long as restarts are allowed, and again when an
        operator asks for it."""
        await self.may_load.wait()
        if not self._lives.recovers:
            return
        self.engine.start_first(rank)
        engine = self._launched(rank, self.engine.processes[rank], number=0)
        while True:
            line = await self._serve(rank, engine)
            self.death = line.life.why_last
            self.client.lost(rank, self.death)
            if not (self._lives.has_ended or line.life.is_retired):
                logger.error(
                    "Engine %s is not started again, and the other engines go on serving: %s",
                    line.label,
                    self.death,
                )
            self._look()
            await self._until(lambda: self._engines[rank].line.life.is_wanted)
            logger.info("Engine %s is started again, because an operator asked for it.", line.label)
            engine = self._start_again(line)

    async def _serve(self, rank: int, engine: LaunchedEngine) -> EngineLine:
        """Run this engine for the rank, and others after it. Returns the line of the last one."""
        while True:
            self._engines[rank] = engine
            line, life = engine.line, engine.line.life
            self.client.attach(line)
            starting = asyncio.create_task(self._start(engine))
            await (engine.watching or self._watching(engine))
            starting.cancel()
            line.close()
            if self._lives.in_step:
                await self._all_end(life)
            if not (life.facts or self._lives.why_never(life)):
                await asyncio.sleep(RETRY_S)
            if not self._lives.why_never(life):
                await self._moved_requests_go_on()
            await self.may_load.wait()
            following = self._following(line)
            if following is None:
                return line
            engine = following

    async def _all_end(self, ended: EngineLife) -> None:
        """End the engines that compute in step with one that has ended, and wait until all have.
        The last one decides for all whether they are started again."""
        for engine in self._engines.values():
            if self._lives.recovers and not engine.line.life.has_ended:
                why = f"engine {ended.rank}, with which it computes in step, has ended"
                engine.line.dismiss(f"{why}: {ended.death}")
                engine.process.kill()
        if self._lives.follow_together(ended):
            self._look()
        await self._until(lambda: ended.is_decided)

    async def _moved_requests_go_on(self) -> None:
        """Wait until the requests that have moved to another engine have got tokens again, unless
        requests wait for an engine."""
        client, end = self.client, self._clock.now() + MOVE_S
        while client.is_ready and client.num_recomputed and not client.num_waiting:
            if self._clock.now() > end:
                break
            await asyncio.sleep(LOOK_S)

    def _watching(self, engine: LaunchedEngine) -> asyncio.Task[None]:
        watchdog_s = self.engine.served.config.options.server.watchdog_timeout
        return asyncio.create_task(engine.process.watch(engine.line, watchdog_s=watchdog_s))

    async def _keep_standby(self, standby: Standby) -> None:
        await self._until(lambda: self._lives.num_served)
        await standby.keep()

    def _start_standby(self) -> LaunchedEngine:
        (line,) = self.client.lines
        number = self._next_number(0)
        process = self.engine.start_another(0, self._job(line, number, is_standby=True))
        engine = self._launched(0, process, number=number)
        engine.made_from = self._present_job()
        engine.line.start(_ignore, _ignore, _ignore, _ignore)
        engine.watching = self._watching(engine)
        return engine

    def _next_number(self, rank: int) -> int:
        """The number of the rank's next engine, which names its recording: not that of its engine
        or of a standby that is there. One that has ended without having served leaves it free."""
        standby = None if self._standby is None else self._standby.engine
        return 1 + max(each.number for each in (self._engines[rank], standby) if each is not None)

    def _present_job(self) -> tuple[object, ...]:
        """The data from which the job of an engine would be made now."""
        config = self.engine.served.config if self._live is None else self._live.config
        checkpoint = None if self._service is None else self._service.weights.checkpoint
        return config, checkpoint, self.client.orders.storage

    def _launched(self, rank: int, process: EngineProcess, *, number: int) -> LaunchedEngine:
        from setpoint.ipc.line import EngineLine

        line = EngineLine(
            process.open_link(),
            rank=rank,
            model=self.engine.served.shared_name,
            pid=process.pid,
            on_progress=self.engine.waiting.doing,
            clock=self._clock,
        )
        return LaunchedEngine(process, line, number)

    async def _start(self, engine: LaunchedEngine) -> None:
        """Wait until the engine takes requests; end it if that takes too long."""
        line, started = engine.line, self._clock.now()
        if await line.wait_ready(timeout_s=READY_TIMEOUT_S):
            if engine.number:
                logger.info(
                    "Engine %s is ready again after %.1f s.",
                    line.label,
                    self._clock.now() - started,
                )
            elif self._service is not None:
                logger.info("Engine %s is ready, too.", line.label)
            self._look()
        elif not line.life.has_ended:
            line.died(f"The engine was not ready after {READY_TIMEOUT_S:g} s.")
            engine.process.kill()

    def _following(self, line: EngineLine) -> LaunchedEngine | None:
        """The engine that replaces an ended one, if one does: the standby, if there is one with the
        current options and weights, or a new engine."""
        standby = self._standby
        has_standby = standby is not None and standby.usable is not None
        successor = self._lives.follow(line.life, has_standby=has_standby)
        if successor is Successor.RESTART:
            logger.warning("Engine %s is started again %s", line.label, self._spent())
            return self._start_again(line)
        if standby is None or successor is None:
            return None
        logger.warning("The standby takes the place of engine %d %s", line.rank, self._spent())
        engine = standby.take()
        self.engine.replace(line.rank, engine.process)
        return engine

    def _spent(self) -> str:
        num_open, restarts = self.client.num_open, self._lives.restarts
        go_on = "1 request goes on" if num_open == 1 else f"{num_open} requests go on"
        return f"({restarts.num_spent} of at most {restarts.most} in an hour); {go_on}."

    def _start_again(self, line: EngineLine) -> LaunchedEngine:
        """A new engine that replaces an ended one."""
        number = self._next_number(line.rank)
        process = self.engine.start_again(line.rank, self._job(line, number))
        return self._launched(line.rank, process, number=number)

    def _job(self, before: EngineLine, number: int, *, is_standby: bool = False) -> EngineJob:
        """The job of an engine that replaces another: with the current live options and weights,
        and a pool no larger than the earlier one."""
        served, live, service = self.engine.served, self._live, self._service
        config = served.config if live is None else live.config
        if before.life.facts is not None:
            num_tokens = before.life.facts.max_total_num_tokens
            config = replace(config, options=config.options.replace(max_total_tokens=num_tokens))
        return served.job(
            rank=before.rank,
            life=number,
            config=config,
            checkpoint=None if service is None else service.weights.checkpoint,
            is_standby=is_standby,
            storage=self.client.orders.storage,
        )


def _ignore(*_: object) -> None:
    """Ignore events of a standby, which has no requests."""
