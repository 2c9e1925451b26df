"""Keeps the standby of a server with one engine (--engine-standby): a second engine that is loaded
and has no requests until it replaces the first one when that dies (decision 0056).

The deaths of standbys are counted separately from the deaths of serving engines: a standby that
keeps dying must not use up the restarts that the server needs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from setpoint.core.errors import SetpointError
from setpoint.ipc.engine_life import EngineLives, RestartBudget
from setpoint.launch.parent.launched_engine import LaunchedEngine

logger = logging.getLogger(__name__)

LOOK_S = 0.25
"""Interval of checking that there is a standby, and that it has the options and weights of the
serving engine."""
MOST_FAILED_STARTS = 3
"""Maximum number of standbys in turn that may end before they are ready."""
READY_RETRY_S, START_RETRY_S = 1.0, 10.0
"""Pause before the next standby: after one that had been ready, and after one that could not
start."""


class Standby:
    def __init__(
        self,
        lives: EngineLives,
        deaths: RestartBudget,
        *,
        start: Callable[[], LaunchedEngine],
        present_job: Callable[[], object],
    ) -> None:
        """deaths: the deaths of standbys. start: starts a standby. present_job: returns the data
        from which the job of an engine would be made now."""
        self._lives = lives
        self._start = start
        self._present_job = present_job
        self._deaths = deaths
        self._num_failed_starts = 0
        """Number of standbys in turn that ended before they were ready."""
        self._leaving: set[asyncio.Task[None]] = set()
        """The watchers of ended standbys, until their processes have ended."""
        self.engine: LaunchedEngine | None = None
        self._why_none = ""
        """Why no standby is started until ``try_again``; "" if one may be started."""

    async def keep(self) -> None:
        """Keep a second engine ready, until cancelled. Call this when the first engine is ready."""
        while True:
            engine = self.engine
            if engine is None:
                if self._lives.is_ready and self._may_start():
                    await self._begin()
            elif (life := engine.line.life).has_ended:
                self.end()
                failed = life.failed
                if failed is not None and failed.is_final:
                    self._why_none = f"The standby engine is not started again. {failed.message}"
                await self._died(life.death, was_ready=life.facts is not None)
            elif engine.made_from != self._present_job():
                logger.info("The standby engine is replaced: options or weights have changed.")
                self.end()
            elif life.is_ready and self._lives.standby != "ready":
                self._lives.standby = "ready"
                self._num_failed_starts = 0
                logger.info("The standby engine is ready.")
            await asyncio.sleep(LOOK_S)

    @property
    def usable(self) -> LaunchedEngine | None:
        """The standby, if there is one with the current options and weights."""
        engine = self.engine
        if engine is None or engine.line.life.has_ended or engine.made_from != self._present_job():
            return None
        return engine

    def take(self) -> LaunchedEngine:
        """The usable standby, which is to serve from now on."""
        engine = self.usable
        assert engine is not None
        self.engine = self._lives.standby = None
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
        self.engine = self._lives.standby = None

    async def until_gone(self) -> None:
        """Wait until the processes that were ended have."""
        if self._leaving:
            await asyncio.wait(self._leaving)

    def try_again(self) -> None:
        """Reset the counts of deaths."""
        self._deaths.reset()
        self._num_failed_starts, self._why_none = 0, ""

    def _may_start(self) -> bool:
        restarts = self._lives.restarts
        most = restarts.most
        if restarts.num_spent > most:  # a standby has taken over beyond the limit
            self._log_absence(f"No standby is started: --max-engine-restarts is {most} an hour.")
            return False
        if self._why_none:
            self._log_absence(self._why_none)
            return False
        return True

    def _log_absence(self, why: str) -> None:
        """Log, once, why there is no standby."""
        if self._lives.standby != "ended":
            self._lives.standby, self._lives.standby_death = "ended", why
            logger.error("%s", why)

    async def _begin(self) -> None:
        try:
            self.engine = self._start()
        except (OSError, SetpointError) as error:
            await self._died(str(error), was_ready=False)
        else:
            self._lives.standby = "starting"

    async def _died(self, death: str, *, was_ready: bool) -> None:
        self._count(death, was_ready=was_ready)
        if not self._why_none:
            await asyncio.sleep(READY_RETRY_S if was_ready else START_RETRY_S)

    def _count(self, death: str, *, was_ready: bool) -> None:
        logger.warning("The standby engine has ended: %s", death)
        self._lives.num_standby_deaths += 1
        self._lives.standby_death = death
        self._num_failed_starts = 0 if was_ready else self._num_failed_starts + 1
        if self._num_failed_starts >= MOST_FAILED_STARTS:
            self._why_none = (
                f"The standby engine failed to start {MOST_FAILED_STARTS} times in turn and is"
                f" not started again. The last one: {death}"
            )
        elif not self._deaths.left:
            self._why_none = (
                f"{death} No other standby is started, because --max-engine-restarts is"
                f" {self._deaths.most} an hour."
            )
        else:
            self._deaths.spend()
