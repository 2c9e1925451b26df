"""A launched engine on an event loop: its line, its watcher, and the service that sends it
requests."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING, Any

from setpoint.launch.engine import Launched
from setpoint.launch.phases import Phases
from setpoint.launch.process import StartupError, kill_with_children, watch

if TYPE_CHECKING:
    from setpoint.frontend.service import Service
    from setpoint.frontend.storage.storage import Storage
    from setpoint.ipc.client import EngineClient
    from setpoint.ipc.line import EngineLine

READY_TIMEOUT_S = 600.0
EXIT_S = 10.0
"""How long the process may take to end after it has been asked to, unless it is said otherwise."""


class EngineSession:
    """A launched engine on a running event loop: an async context manager whose exit ends the
    engine in order."""

    def __init__(self, engine: Launched, phases: Phases, *, storage: Storage | None = None) -> None:
        """storage: where the service keeps clients' files, if anywhere."""
        from setpoint.ipc.client import EngineClient
        from setpoint.ipc.line import EngineLine
        from setpoint.ipc.link import SocketLink

        self.engine = engine
        self.line: EngineLine = EngineLine(
            SocketLink(engine.link), on_progress=engine.waiting.doing
        )
        self.client: EngineClient = EngineClient()
        self.exit_s = EXIT_S
        """How long the process may take to end after it has been asked to."""
        self._phases = phases
        self._storage = storage

    async def __aenter__(self) -> EngineSession:
        self.client.attach(self.line)
        watchdog_s = self.engine.served.config.options.server.watchdog_timeout
        self.watcher = asyncio.create_task(
            watch(self.engine.process, self.line, watchdog_s=watchdog_s)
        )
        """A task that is done when the process has ended; the line knows by then."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.client.shutdown()
        await asyncio.wait([self.watcher], timeout=self.exit_s)
        self.kill()
        await self.watcher
        self.client.close()

    async def service_unless(self, called_off: asyncio.Future[Any]) -> Service | None:
        """Like ``service``; if ``called_off`` is done first, the engine is killed and None is
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
        """End the process at once; the only way while it is loading and reads no messages."""
        kill_with_children(self.engine.process)

    async def service(self) -> Service:
        """Wait until the engine can take requests. Raises StartupError if it cannot start."""
        from setpoint.launch.assembly import make_service

        self._phases.mark("HTTP")
        if not await self.line.wait_ready(timeout_s=READY_TIMEOUT_S):
            raise StartupError(
                self.line.death or f"The engine was not ready after {READY_TIMEOUT_S:g} s."
            )
        self.engine.waiting.end()
        self._phases.mark("waiting for the engine")
        startup_s = sum(self._phases.seconds.values())
        return make_service(
            self.engine, self.client, self.line.facts, startup_s=startup_s, storage=self._storage
        )
