"""The engines of several models on one event loop: starts them one after another, so that never
more are loaded than fit, and makes one service of each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from setpoint.config.multi_model import in_order_of_loading
from setpoint.core.awake import CLOCK
from setpoint.core.errors import SetpointError
from setpoint.launch.parent.engine_session import EngineSession

if TYPE_CHECKING:
    from setpoint.frontend.multi_model.models import ModelSwapper
    from setpoint.frontend.residence import Residence
    from setpoint.frontend.service import Service

logger = logging.getLogger(__name__)


class MultiModelSessions:
    """Has the interface of an EngineSession, for the engines of all models."""

    def __init__(self, sessions: Sequence[EngineSession], max_loaded: int) -> None:
        """sessions: of the models, in their order; their engines have no jobs yet."""
        self.engine = sessions[0].engine
        self.client = sessions[0].client
        self._sessions = sessions
        self._max_loaded = max_loaded
        self._stack = AsyncExitStack()
        self._is_ending = False

    @property
    def death(self) -> str:
        """Why no model has an engine left."""
        return self._sessions[-1].death

    @property
    def exit_s(self) -> float:
        """How long the processes may take to end after they have been asked to."""
        return self._sessions[0].exit_s

    @exit_s.setter
    def exit_s(self, seconds: float) -> None:
        for session in self._sessions:
            session.exit_s = seconds

    async def __aenter__(self) -> MultiModelSessions:
        for session in self._sessions:
            await self._stack.enter_async_context(session)
        self.over: asyncio.Task[Any] = asyncio.create_task(self._until_over())
        """Done when no model has an engine."""
        return self

    async def _until_over(self) -> None:
        await asyncio.gather(*(asyncio.shield(session.over) for session in self._sessions))

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()  # all at once, and not each when the one before has ended
        await self._stack.__aexit__(kind, error, trace)
        await self.over

    async def services_unless(self, called_off: asyncio.Future[Any]) -> tuple[Service, ...]:
        """The services of all models, in their order, once each has been loaded; none if
        ``called_off`` is done first. Raises SetpointError if one cannot be served."""
        starting = asyncio.create_task(self._services())
        await asyncio.wait([starting, called_off], return_when=asyncio.FIRST_COMPLETED)
        if called_off.done():
            starting.cancel()
            for session in self._sessions:
                session.kill()
            return ()
        return starting.result()

    def shutdown(self) -> None:
        """Ask the engines to end; they are not replaced. Open requests fail."""
        self._is_ending = True
        for session in self._sessions:
            session.shutdown()

    def _gone(
        self, models: ModelSwapper, name: str, session: EngineSession, _: asyncio.Future[None]
    ) -> None:
        if not self._is_ending:
            logger.error("Model %s is not served any more: %s", name, session.death)
        models.gone(name)

    async def _services(self) -> tuple[Service, ...]:
        from setpoint.frontend.multi_model.models import ModelSwapper

        sessions = {_name(each): each for each in self._sessions}
        models = ModelSwapper(
            {name: (each.client, each.may_load) for name, each in sessions.items()},
            most=self._max_loaded,
            clock=CLOCK,
        )
        services: dict[str, Service] = {}
        for session in in_order_of_loading(self._sessions, self._max_loaded):
            name = _name(session)
            services[name] = await _loaded(session, models.models[name])
            models.loaded(name)
            if session not in self._sessions[: self._max_loaded]:
                await models.unload(name)
        for name, session in sessions.items():
            session.over.add_done_callback(partial(self._gone, models, name, session))
        working = asyncio.create_task(models.run())
        self._stack.push_async_callback(_cancelled, working)
        stay = ", ".join([*sessions][: self._max_loaded])
        logger.info(
            "%d models are served, of which at most %d %s loaded at a time (--max-loaded-models)."
            " Loaded now: %s.",
            len(sessions),
            self._max_loaded,
            "is" if self._max_loaded == 1 else "are",
            stay,
        )
        return tuple(services[name] for name in sessions)


def _name(session: EngineSession) -> str:
    name = session.engine.served.config.options.model.served_model_name
    assert name is not None
    return name


async def _loaded(session: EngineSession, residence: Residence) -> Service:
    """The service of a model whose engine is started now, after its first request. Raises
    SetpointError, with the model's name."""
    from setpoint.frontend.warm_up import warm_up

    session.may_load.set()
    try:
        service = await session.service(residence)
    except SetpointError as error:
        error.args = (f"Model {_name(session)}: {error}",)
        raise
    if not session.engine.served.config.options.server.skip_server_warmup:
        await warm_up(service.answering)
    return service


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError, SetpointError):
        await task
