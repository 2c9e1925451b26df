"""``setpoint serve``: the parent process. It owns the port and the HTTP side, and supervises the
engine processes. Order of start: port, engine (see ``launch.parent.engine`` and ``engine_session``
beside it), HTTP parts while it loads, listening, warm-up. Order of end: refuse new requests, finish
open ones, end the engine.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import signal
import socket
import threading
import time
from asyncio import Task
from collections.abc import Callable, Coroutine, Iterator, Sequence, Set
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from setpoint.config.environment import EnvSettings
from setpoint.config.hardware import is_in_memory
from setpoint.config.multi_model import each_model, in_order_of_loading
from setpoint.config.options import Options
from setpoint.core.content_digest import cache_folder
from setpoint.core.errors import EngineDeadError, SetpointError
from setpoint.launch.deadline import END_S, SIGNALS
from setpoint.launch.parent.bootstrapping import bootstrapping
from setpoint.launch.parent.engine import Launched, launch_engine
from setpoint.launch.parent.engine_session import EngineSession
from setpoint.launch.parent.invitation import NOT_FOR_CLIENTS, address, address_only, invitation
from setpoint.launch.parent.multi_model import MultiModelSessions
from setpoint.launch.parent.phases import Phases
from setpoint.launch.parent.publishing import publishing
from setpoint.launch.parent.served_model import MachineShare
from setpoint.launch.parent.signals import EndAsked, run_until_asked
from setpoint.observe.logline import leave_out_of_access_log, setup_logging
from setpoint.observe.progress_display import in_the_log

if TYPE_CHECKING:
    from setpoint.frontend.http.serve import Server
    from setpoint.frontend.service import Service
    from setpoint.frontend.storage.storage import Storage
    from setpoint.frontend.workers import Worker
    from setpoint.ipc.block_sink import BlockSink

logger = logging.getLogger(__name__)

GC_THRESHOLDS = (50_000, 20, 20)
"""When the frontend's garbage is collected (``gc.set_threshold``). With Python's own numbers, a
burst of 2,000 requests has all their objects scanned again and again, for 0.1 to 0.2 s each time,
while probes wait. Almost nothing here is in cycles, so little garbage waits for the collector."""
CLOSE_S = 5.0
"""How long connections may take to close once all requests have ended, if there is time."""
LEAST_CLOSE_S = 0.3
"""The same, if there is no time left."""
ABORT_S = 0.5
"""How long the engine may take to end the requests that are aborted."""
LEAVE_S = 1.0
"""How long batches and responses in the background may take to store their state."""
KILL_S = 0.6
"""The part of END_S that is reserved for killing an engine and ending this process."""


def serve(
    options: Options,
    env: EnvSettings,
    *,
    given: Set[str] = frozenset(),
    models: Sequence[str] = (),
) -> int:
    """Serve until a signal asks for the end; returns the exit code. models: several models instead
    of that of the options (``config.multi_model``). Raises SetpointError if the start fails."""
    from setpoint.frontend.http.port import bind_socket

    phases = Phases()
    faulthandler.enable()  # native code that crashes: the log has the stack of every thread
    setup_logging(options.logs.log_level, milliseconds=env.log_ms)
    with ExitStack() as stack:
        sock = stack.enter_context(bind_socket(options.server.host, options.server.port))
        bootstrap = storage = None
        if options.disaggregation.role == "prefill":
            bootstrap = bind_socket(
                options.server.host,
                options.disaggregation.disaggregation_bootstrap_port,
                flag="--disaggregation-bootstrap-port",
                what="The bootstrap port: ",
            )
            stack.enter_context(bootstrap)
        if options.answers.file_storage_path is not None:
            from setpoint.frontend.storage.storage import Storage

            storage = stack.enter_context(closing(Storage(Path(options.answers.file_storage_path))))
        publisher = stack.enter_context(publishing(options))
        engines = list(_launch(stack, options, env, given, phases, models))
        stack.enter_context(bootstrapping(engines[0].served, bootstrap))
        serving = _Serving(engines, sock, storage, publisher, phases)
        code: int = run_until_asked(serving.run, limit_s=lambda: serving.drain_s + END_S)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # the process is ending already
        return code


def _launch(
    stack: ExitStack,
    options: Options,
    env: EnvSettings,
    given: Set[str],
    phases: Phases,
    models: Sequence[str],
) -> Iterator[Launched]:
    """The engine of the one model, or of each."""
    launch = partial(launch_engine, env=env, phases=phases, display=in_the_log())
    if not models:
        yield stack.enter_context(launch(options, given=given))
        return
    folder = cache_folder()
    if is_in_memory(folder):
        logger.warning(
            "The folder %s is on a file system in memory (tmpfs), so the weights of models that are"
            " not loaded take memory as well. Set XDG_CACHE_HOME to a folder on a disk.",
            folder,
        )
    most = options.parallel.max_loaded_models
    given = given | {"model_path", "served_model_name"}
    found = each_model(options, models, given - {"served_model_name"})
    order = in_order_of_loading([each.model.served_model_name or "" for each in found], most)
    for each in found:
        before = order[: order.index(each.model.served_model_name or "")]
        share = MachineShare(most, str(folder), tuple(before))
        try:
            yield stack.enter_context(launch(each, given=given, share=share))
        except SetpointError as error:
            error.args = (f"Model {each.model.served_model_name}: {error}",)
            raise


class _Serving:
    """A server from the moment when its engine has been launched to its end."""

    def __init__(
        self,
        engines: Sequence[Launched],
        sock: socket.socket,
        storage: Storage | None,
        publisher: BlockSink | None,
        phases: Phases,
    ) -> None:
        """engines: of one model, or of each of several."""
        self._engine = engines[0]
        self._engines = engines
        self._sock = sock
        self._storage = storage
        self._publisher = publisher
        self._phases = phases
        self._services: Sequence[Service] = ()
        """The services of all models, in their order; none before they can be used."""
        self._working: Task[None] | None = None

    @property
    def drain_s(self) -> float:
        """How long running requests may continue after a signal, according to the live option."""
        if not self._services:
            return self._engine.served.config.options.server.drain_timeout
        return self._services[0].live.frontend.drain_timeout_s

    async def run(self, asked: EndAsked) -> int:
        """Serve until asked to end; returns the exit code. Raises EngineDeadError."""
        # Called here, where a user can interrupt steps that take long.
        from setpoint.frontend.apis.dialects import DIALECTS
        from setpoint.frontend.http.app import create_app
        from setpoint.frontend.http.port import is_loopback
        from setpoint.frontend.http.serve import make_server

        stopped = asyncio.create_task(asked.end.wait())
        async with self._session() as session:
            services = self._services = await session.services_unless(stopped)
            if not services:
                logger.info("Shutting down before the model was loaded.")
                return 0
            options = self._engine.served.config.options
            log_level = options.logs.log_level_http or options.logs.log_level
            app = create_app(
                services[0],
                DIALECTS,
                others=services[1:],
                local_only=is_loopback(self._sock),
            )
            leave_out_of_access_log(options.logs.uvicorn_access_log_exclude_prefixes)
            server = make_server(app, log_level=log_level)
            opening = _open(session, services[0], server.listening, self._phases)
            work = partial(_work, services, app.state.workers)
            try:
                await self._answer(server, opening, work, [stopped, session.over])
            finally:
                session.exit_s = await self._end(session, server, asked)
            if not asked.end.is_set():
                raise EngineDeadError(session.death)
            return 0

    def _session(self) -> EngineSession | MultiModelSessions:
        from setpoint.frontend.composition import ServerParts

        parts = ServerParts.of(self._storage)
        sessions = [
            EngineSession(each, self._phases, of_server=parts, blocks=self._publisher)
            for each in self._engines
        ]
        if len(sessions) == 1:
            return sessions[0]
        return MultiModelSessions(
            sessions, self._engine.served.config.options.parallel.max_loaded_models
        )

    async def _answer(
        self,
        server: Server,
        opening: Coroutine[Any, Any, None],
        work: Worker,
        over: Sequence[Task[Any]],
    ) -> None:
        """Listen, run ``opening``, and then ``work``, until one of ``over`` is done."""
        opened = asyncio.create_task(opening)
        self._listening = listening = asyncio.create_task(server.serve(sockets=[self._sock]))
        try:
            await _first(opened, listening, *over)
            if opened.done():
                opened.result()
                self._working = asyncio.create_task(work())
                await _first(listening, *over)
        finally:
            opened.cancel()

    async def _end(
        self,
        session: EngineSession | MultiModelSessions,
        server: Server,
        asked: EndAsked,
    ) -> float:
        """End requests and connections; returns how long the engine may take to end after that."""
        until = time.monotonic()
        if asked.end.is_set():
            until += self.drain_s
            self._services[0].drain.begin()  # which is that of all
        if self._working is not None:  # the next start continues its work
            self._working.cancel()
            await asyncio.wait([self._working], timeout=LEAVE_S)
        if asked.end.is_set():
            await _drain(self._services, self.drain_s, asked)
            for each in self._services:
                each.answering.text.close()  # the chats that wait for it would be refused behind it
        session.shutdown()
        if asked.at_once.is_set():
            until = min(until, time.monotonic())
        server.end(min(max(until - time.monotonic(), LEAST_CLOSE_S), CLOSE_S))
        cutting = asyncio.create_task(_cut_at_second_signal(asked, server))
        await self._listening
        cutting.cancel()
        await _finish(self._services, max(until - time.monotonic(), LEAST_CLOSE_S))
        return max(until + END_S - KILL_S - time.monotonic(), LEAST_CLOSE_S)


async def _work(services: Sequence[Service], workers: Sequence[Worker]) -> None:
    """Watch the engines, and run the batches of clients and the other ``workers``, until
    cancelled."""
    async with asyncio.TaskGroup() as group:
        for each in services:
            group.create_task(each.watch.run())
        for work in (*(work for each in services for work in each.workers), *workers):
            group.create_task(work())
        if (storage := services[0].storage) is not None:
            from setpoint.batch.worker import BatchWorker

            group.create_task(BatchWorker(services[0].answering, storage).run())


async def _drain(services: Sequence[Service], drain_s: float, asked: EndAsked) -> None:
    """Let the running requests end; abort those that still run after ``drain_s`` or at a second
    signal. The port stays open."""

    def num_open() -> int:
        return sum(each.engine.num_open for each in services)

    num_running = num_open()
    if num_running:
        logger.info(
            "Draining: %s %g s to end (--drain-timeout). A second signal aborts what runs.",
            "1 request runs and has"
            if num_running == 1
            else f"{num_running} requests run and have",
            drain_s,
        )
    await _until(lambda: not num_open() or asked.at_once.is_set(), drain_s)
    if asked.at_once.is_set():
        logger.info("A second signal: open requests are cut off.")
    if num_left := num_open():
        logger.warning(
            "1 request was still running and is aborted."
            if num_left == 1
            else f"{num_left} requests were still running and are aborted."
        )
        for each in services:
            each.drain.cut(each.engine)
        await _until(lambda: not num_open(), ABORT_S)


async def _until(holds: Callable[[], bool], seconds: float) -> None:
    """Wait until the condition holds, for at most this many seconds."""
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        await asyncio.sleep(0.02)


async def _finish(services: Sequence[Service], seconds: float) -> None:
    """Send the remaining spans, for at most this many seconds."""

    def work() -> None:
        for each in services:
            for send in each.at_end:
                send()

    thread = threading.Thread(target=work, name="at-end", daemon=True)
    thread.start()
    await _until(lambda: not thread.is_alive(), seconds)
    if thread.is_alive():
        logger.warning("The last spans could not be sent in time and are lost.")


async def _cut_at_second_signal(asked: EndAsked, server: Server) -> None:
    """Close all connections at a second signal that comes while they are closing."""
    if not asked.at_once.is_set():
        await asked.at_once.wait()
        server.cut()


async def _open(
    session: EngineSession | MultiModelSessions,
    service: Service,
    listening: asyncio.Event,
    phases: Phases,
) -> None:
    options = session.engine.served.config.options
    if not options.server.skip_server_warmup:
        from setpoint.frontend.warm_up import warm_up

        await warm_up(service.answering)
    await listening.wait()  # without a warm-up, this task would be first to call itself ready
    phases.mark("warm-up")
    gc.collect()
    gc.freeze()  # these objects stay: a full collection would scan all of them while streams wait
    gc.set_threshold(*GC_THRESHOLDS)
    logger.info("The server is fired up and ready to roll!")
    for line in session.client.lines:
        if line.life.facts is not None:
            logger.debug("Start-up took %s; engine: %s", phases, _seconds(line.facts.phases))
    url = address(options.server.host, options.server.port)
    model = options.model.served_model_name if service.residence.is_shared else None
    print(_invitation(url, options, model or ""), end="", flush=True)


def _invitation(url: str, options: Options, model: str = "") -> str:
    pairs = options.disaggregation
    if pairs.disaggregation_mode != "null" and not pairs.disaggregation_prefill_servers:
        return address_only(url, NOT_FOR_CLIENTS[pairs.disaggregation_mode])
    return invitation(
        url,
        has_key=bool(options.server.api_keys),
        is_embedding=options.model.is_embedding,
        is_ids_only=options.model.skip_tokenizer_init,
        model=model,
    )


async def _first(*tasks: asyncio.Future[Any]) -> None:
    """Wait until one of the tasks is done."""
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


def _seconds(phases: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.1f}" for name, seconds in phases.items())
