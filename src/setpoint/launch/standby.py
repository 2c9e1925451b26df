"""The standby of a server with one engine (--engine-standby): a second engine that is loaded and
has no requests, until it takes the place of the one that dies (decision 0056).

Each death of a standby is counted, apart from the deaths of engines that serve: a standby that
cannot live must not use up the restarts that the server needs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from setpoint.core.errors import SetpointError
from setpoint.launch.launched_engine import LaunchedEngine
from setpoint.launch.restart_budget import RestartBudget

if TYPE_CHECKING:
    from setpoint.ipc.client import EngineClient

logger = logging.getLogger(__name__)

LOOK_S = 0.25
"""How often it is seen to that there is a standby, and that it is like the engine that serves."""
MOST_FAILED_STARTS = 3
"""So many standbys in turn may end before they are ready."""
READY_RETRY_S, START_RETRY_S = 1.0, 10.0
"""Pause before the next standby, if the one before had been ready, and if it could not start."""


class Standby:
    def __init__(
        self,
        client: EngineClient,
        serving: RestartBudget,
        deaths: RestartBudget,
        *,
        start: Callable[[], LaunchedEngine],
        unused: Callable[[LaunchedEngine], None],
        present_job: Callable[[], object],
    ) -> None:
        """serving: the restarts of engines that serve. deaths: those of standbys. start:
        starts a standby. unused: called with one that has ended without having served.
        present_job: what the job of an engine that started now would be made from."""
        self._client = client
        self._serving = serving
        self._start = start
        self._unused = unused
        self._present_job = present_job
        self._deaths = deaths
        self._num_failed_starts = 0
        """In turn."""
        self._leaving: set[asyncio.Task[None]] = set()
        """The watchers of standbys that were ended, until their processes have."""
        self.engine: LaunchedEngine | None = None
        self._why_none = ""
        """Why no other is started until ``try_again``; "" if one may be."""

    async def keep(self) -> None:
        """Have a second engine ready, until cancelled. To be called once the first one is."""
        while True:
            engine = self.engine
            if engine is None:
                if self._client.is_ready and self._may_start():
                    await self._begin()
            elif engine.line.has_ended:
                self.end()
                await self._died(engine.line.death, was_ready=engine.line.was_ready)
            elif engine.made_from != self._present_job():
                logger.info("The standby engine is replaced: options or weights have changed.")
                self.end()
            elif engine.line.is_ready and self._client.standby != "ready":
                self._client.standby = "ready"
                self._num_failed_starts = 0
                logger.info("The standby engine is ready.")
            await asyncio.sleep(LOOK_S)

    def take(self) -> LaunchedEngine | None:
        """The standby, to serve from now on, if there is one with the options and weights of
        now."""
        engine = self.engine
        if engine is None or engine.line.has_ended or engine.made_from != self._present_job():
            return None
        self.engine = self._client.standby = None
        return engine

    def end(self) -> None:
        """End the standby, if there is one."""
        engine = self.engine
        if engine is not None:
            engine.line.shutdown()
            engine.line.close()
            engine.process.end()
            assert engine.watching is not None
            self._leaving.add(engine.watching)
            engine.watching.add_done_callback(self._leaving.discard)
            self._unused(engine)
        self.engine = self._client.standby = None

    async def until_gone(self) -> None:
        """Wait until the processes that were ended have."""
        if self._leaving:
            await asyncio.wait(self._leaving)

    def try_again(self) -> None:
        """Forget the deaths so far."""
        self._deaths.reset()
        self._num_failed_starts, self._why_none = 0, ""

    def _may_start(self) -> bool:
        most = self._serving.most
        if self._serving.num_spent > most:  # a standby has taken over beyond the limit
            self._none(f"No standby is started: --max-engine-restarts is {most} an hour.")
            return False
        if self._why_none:
            self._none(self._why_none)
            return False
        return True

    def _none(self, why: str) -> None:
        """Tell, once, why there is no standby."""
        if self._client.standby != "ended":
            self._client.standby, self._client.standby_death = "ended", why
            logger.error("%s", why)

    async def _begin(self) -> None:
        try:
            self.engine = self._start()
        except (OSError, SetpointError) as error:
            await self._died(str(error), was_ready=False)
        else:
            self._client.standby = "starting"

    async def _died(self, death: str, *, was_ready: bool) -> None:
        self._count(death, was_ready=was_ready)
        if not self._why_none:
            await asyncio.sleep(READY_RETRY_S if was_ready else START_RETRY_S)

    def _count(self, death: str, *, was_ready: bool) -> None:
        logger.warning("The standby engine has ended: %s", death)
        self._client.num_standby_deaths += 1
        self._client.standby_death = death
        self._num_failed_starts = 0 if was_ready else self._num_failed_starts + 1
        if self._num_failed_starts >= MOST_FAILED_STARTS:
            self._why_none = (
                f"The standby engine could not start {MOST_FAILED_STARTS} times in turn, and no"
                f" other is started. The last one: {death}"
            )
        elif not self._deaths.left:
            self._why_none = (
                f"{death} No other standby is started: --max-engine-restarts is"
                f" {self._deaths.most} an hour."
            )
        else:
            self._deaths.spend()
