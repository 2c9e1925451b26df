"""A server without a port: the HTTP application of a started engine, for a program that has its own
listener. The server runs on the program's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.applications import Starlette

from setpoint.config.environment import EnvSettings
from setpoint.config.options import Options
from setpoint.frontend.apis.dialects import DIALECTS
from setpoint.frontend.http.app import create_app
from setpoint.frontend.service import Service
from setpoint.frontend.warm_up import warm_up
from setpoint.launch.parent.engine import launch_engine
from setpoint.launch.parent.engine_session import EngineSession
from setpoint.launch.parent.phases import Phases


@dataclass(slots=True, frozen=True)
class Hosted:
    service: Service
    app: Starlette
    session: EngineSession


@asynccontextmanager
async def hosted(options: Options, env: EnvSettings, *, given: Set[str]) -> AsyncIterator[Hosted]:
    """A context with a server that has been warmed up; its exit ends the engine. The engine reports
    which prefixes its cache holds. Raises SetpointError if the start fails."""
    phases = Phases()
    with launch_engine(
        options, env, given=given, phases=phases, display=None, tells_prefixes=True
    ) as engine:
        async with EngineSession(engine, phases) as session:
            service = await session.service()
            if not options.server.skip_server_warmup:
                await warm_up(service.answering)
            watching = asyncio.create_task(service.watch.run())
            try:
                yield Hosted(service, create_app(service, DIALECTS), session)
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
