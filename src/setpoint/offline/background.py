"""Runs an engine and its service on an event loop in a separate thread. Callers on any other thread
or event loop hand over a coroutine and wait for it. This module does not know what the coroutines
do.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Coroutine, Set
from concurrent.futures import Future
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

from setpoint.config.environment import EnvSettings
from setpoint.config.options import Options
from setpoint.core.errors import EngineDeadError
from setpoint.launch.parent.engine import Launched, launch_engine
from setpoint.launch.parent.engine_session import EngineSession
from setpoint.launch.parent.phases import Phases
from setpoint.observe.progress_display import on_stderr

if TYPE_CHECKING:
    from setpoint.frontend.service import Service

T = TypeVar("T")

_CLOSED = "This Engine has been shut down."


class BackgroundService:
    """A service that is ready after construction and ends with ``close``. Safe to use from any
    thread."""

    def __init__(self, options: Options, env: EnvSettings, *, given: Set[str]) -> None:
        """Start the engine. Raises SetpointError if it cannot start. An interrupt leaves nothing
        running."""
        self._owner = os.getpid()
        self._lock = threading.Lock()
        """Held while a coroutine is handed over and while the service ends, so that the loop gets
        every coroutine before it learns of the end."""
        self._stop: Future[None] = Future()
        """Done when the service is to end."""
        ready: Future[Service] = Future()
        phases = Phases(started_at=time.time())
        display = None if options.logs.log_level in ("error", "critical") else on_stderr()
        with ExitStack() as stack:
            engine = stack.enter_context(
                launch_engine(options, env, given=given, phases=phases, display=display)
            )
            self._processes = engine.processes
            self._thread = threading.Thread(
                target=self._run, args=(engine, phases, ready), name="setpoint-engine", daemon=True
            )
            self._thread.start()
            stack.callback(self._end_thread)
            self.service = ready.result()
            self._stack = stack.pop_all()

    @property
    def pid(self) -> int:
        """Process id of the current engine; of the first engine if there are several."""
        pid = self._processes[0].pid
        assert pid is not None, "the engine has been ready"
        return pid

    @property
    def is_closed(self) -> bool:
        return self._stop.done()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine on the service's loop and return its result. An exception in the caller
        (Ctrl-C) cancels it. Raises what the coroutine raises, or EngineDeadError."""
        future = self._submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def acall(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Like ``call``, for a coroutine on any event loop."""
        return await asyncio.wrap_future(self._submit(coroutine))

    def close(self) -> None:
        """End the engine in order. Does nothing the second time, and nothing in a forked child,
        because the engine belongs to the parent."""
        if os.getpid() == self._owner:
            self._stack.close()

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        is_ours = os.getpid() == self._owner  # a fork may have copied the lock while it was held
        if is_ours:
            with self._lock:
                if not self.is_closed:
                    return asyncio.run_coroutine_threadsafe(
                        self._told_of_the_end(coroutine), self._loop
                    )
        coroutine.close()
        raise EngineDeadError(
            _CLOSED
            if is_ours
            else "This Engine belongs to another process; create one after the fork."
        )

    async def _told_of_the_end(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            return await coroutine
        except asyncio.CancelledError:
            if self.is_closed:
                raise EngineDeadError(_CLOSED) from None
            raise

    def _end_thread(self) -> None:
        with self._lock:
            if not self.is_closed:
                self._stop.set_result(None)
        if (
            threading.current_thread() is not self._thread
        ):  # the last reference may disappear in that thread
            self._thread.join()

    def _run(self, engine: Launched, phases: Phases, ready: Future[Service]) -> None:
        import uvloop

        try:
            uvloop.run(self._serve(engine, phases, ready))
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    async def _serve(self, engine: Launched, phases: Phases, ready: Future[Service]) -> None:
        self._loop = asyncio.get_running_loop()
        stop = asyncio.wrap_future(self._stop)
        async with EngineSession(engine, phases) as session:
            services = await session.services_unless(stop)
            if not services:
                raise EngineDeadError(_CLOSED)
            ready.set_result(*services)
            await stop
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        for task in calls:
            task.cancel()
        if calls:
            await asyncio.wait(calls)
