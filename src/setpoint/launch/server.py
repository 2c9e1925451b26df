"""``setpoint serve``: the parent process. It owns the port and the HTTP side, and supervises the
engine process. Order of start: port, engine (see ``launch.engine``, ``launch.engine_session``),
HTTP parts while it loads, listening, warm-up. Order of end: refuse new requests, finish open ones,
end the engine.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import signal
import socket
import time
from asyncio import Task
from collections.abc import Callable, Coroutine, Iterator, Sequence, Set
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from setpoint.config.environment import EnvSettings
from setpoint.config.options import Options
from setpoint.core.errors import EngineDeadError
from setpoint.launch.engine import Launched, launched
from setpoint.launch.engine_session import EngineSession
from setpoint.launch.held_signals import SIGNALS, signals_held
from setpoint.launch.invitation import address, invitation
from setpoint.launch.phases import Phases
from setpoint.observe.logline import leave_out_of_access_log, setup_logging
from setpoint.observe.waiting import in_the_log

if TYPE_CHECKING:
    from setpoint.frontend.http.serve import Server
    from setpoint.frontend.service import Service
    from setpoint.frontend.storage.storage import Storage

logger = logging.getLogger(__name__)

DRAIN_S = 5
"""How long open requests may continue after a signal to end."""
CLOSE_S = 5
"""How long connections may take to close after that."""


def serve(options: Options, env: EnvSettings, *, given: Set[str] = frozenset()) -> int:
    """Serve until a signal to end; returns the exit code. Raises SetpointError for a start that
    fails."""
    from setpoint.frontend.http.port import bind_socket

    phases = Phases()
    faulthandler.enable()  # native code that crashes: the log has the stack of every thread
    setup_logging(options.log_level, milliseconds=env.log_ms)
    with (
        bind_socket(options.host, options.port) as sock,
        _storage(options) as storage,
        launched(options, env, given=given, phases=phases, display=in_the_log()) as engine,
    ):
        import uvloop

        with signals_held() as release:
            code: int = uvloop.run(_serve(engine, sock, storage, phases, release))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # this is the end already
        return code


@contextmanager
def _storage(options: Options) -> Iterator[Storage | None]:
    """The folder for clients' files, before anything is loaded. Raises ConfigError."""
    if options.file_storage_path is None:
        yield None
        return
    from setpoint.frontend.storage.storage import Storage

    with closing(Storage(Path(options.file_storage_path))) as storage:
        yield storage


async def _serve(
    engine: Launched,
    sock: socket.socket,
    storage: Storage | None,
    phases: Phases,
    release_signals: Callable[[], object],
) -> int:
    stop, urged = asyncio.Event(), asyncio.Event()
    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(
            number, lambda: urged.set() if stop.is_set() else stop.set()
        )
    release_signals()
    # After the signal handlers are set, because these steps take long enough for a user to
    # interrupt them.
    from setpoint.frontend.apis.dialects import DIALECTS
    from setpoint.frontend.http.app import create_app
    from setpoint.frontend.http.port import is_loopback
    from setpoint.frontend.http.serve import make_server

    stopped = asyncio.create_task(stop.wait())
    async with EngineSession(engine, phases, storage=storage) as session:
        service = await session.service_unless(stopped)
        if service is None:
            return 0
        options = engine.config.options
        log_level = options.log_level_http or options.log_level
        app = create_app(service, DIALECTS, local_only=is_loopback(sock))
        leave_out_of_access_log(options.uvicorn_access_log_exclude_prefixes)
        server = make_server(app, log_level=log_level, drain_s=DRAIN_S + CLOSE_S)
        await _answer(
            service,
            server,
            sock,
            _open(session, service, phases),
            [stopped, session.watcher],
            urged,
        )
        if not stop.is_set():
            raise EngineDeadError(session.line.death)
        return 0


async def _answer(
    service: Service,
    server: Server,
    sock: socket.socket,
    opening: Coroutine[Any, Any, None],
    over: Sequence[Task[Any]],
    urged: asyncio.Event,
) -> None:
    """Listen, run ``opening``, and serve until one of ``over`` is done. Open requests then have
    DRAIN_S to end, or until a second signal sets ``urged``."""
    serving, opened = (
        asyncio.create_task(server.serve(sockets=[sock])),
        asyncio.create_task(opening),
    )
    working: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    try:
        await _first(opened, serving, *over)
        if opened.done():
            opened.result()
            working = asyncio.create_task(_work(service))
            await _first(serving, *over)
    finally:
        opened.cancel()
        working.cancel()
        server.should_exit = True
        cutting = asyncio.create_task(_cut_when(urged, server))
        deadline = time.monotonic() + DRAIN_S
        while service.engine.num_open and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        service.engine.shutdown()
        await serving
        cutting.cancel()


async def _work(service: Service) -> None:
    """Watch the engine, and run the batches of clients, until cancelled."""
    async with asyncio.TaskGroup() as group:
        group.create_task(service.watch.run())
        if service.storage is not None:
            from setpoint.batch.worker import BatchWorker

            group.create_task(BatchWorker(service, service.storage).run())


async def _cut_when(urged: asyncio.Event, server: Server) -> None:
    await urged.wait()
    logger.info("A second signal: open requests are cut off.")
    server.cut()


async def _open(session: EngineSession, service: Service, phases: Phases) -> None:
    options = session.engine.config.options
    if not options.skip_server_warmup:
        await service.warm_up()
    phases.mark("warm-up")
    gc.collect()
    gc.freeze()  # these objects stay: a full collection would scan all of them while streams wait
    logger.info("The server is fired up and ready to roll!")
    logger.debug("Start-up took %s; engine: %s", phases, _seconds(session.line.facts.phases))
    url = address(options.host, options.port)
    print(
        invitation(url, has_key=options.api_key is not None, is_embedding=options.is_embedding),
        end="",
        flush=True,
    )


async def _first(*tasks: asyncio.Future[Any]) -> None:
    """Wait until one of the tasks is done."""
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


def _seconds(phases: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.1f}" for name, seconds in phases.items())
