"""Whether the engines work, as probes of the server ask."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from setpoint.core.errors import EngineDeadError, RequestError
from setpoint.core.request import Request, RequestOptions, pack_ids
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.config import FrontendConfig
from setpoint.frontend.intake import new_rid
from setpoint.ipc.client import EngineClient
from setpoint.ipc.line import EngineLine
from setpoint.ipc.mailbox import Mailbox

RECENT_S = 1.0
"""Tokens that arrived within this time prove that the engine is healthy."""


@dataclass(slots=True, frozen=True)
class Health:
    """Probes of the engines of one model."""

    _engine: EngineClient
    _config: FrontendConfig

    async def is_healthy(self) -> bool:
        """Whether an engine works. One that computes a step does, until the watchdog takes it to
        hang. With open requests, any message within the time limit of the probe proves it, so that
        a probe does not wait for the end of a long step. Without, recent tokens prove it; otherwise
        the engine is sent a request, unless it is paused."""
        lines = [line for line in self._engine.lines if line.life.is_ready]
        asked = [asyncio.create_task(self._is_alive(line)) for line in lines]
        try:
            for first in asyncio.as_completed(asked):
                if await first:
                    return True
            return False
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def _is_alive(self, line: EngineLine) -> bool:
        timeout_s = self._config.health_timeout_s
        try:
            if line.suspects and line.silence_s < self._config.watchdog_s:
                return True
            if self._engine.num_open:
                return line.silence_s < timeout_s or await line.responds(timeout_s=timeout_s)
            if line.result_age_s < RECENT_S:
                return True
            if await self._is_busy(line):
                return line.life.is_ready
            return await self._answers_a_probe(line)
        except EngineDeadError:
            return False

    async def _is_busy(self, line: EngineLine) -> bool:
        """Whether an engine that answers is busy or paused, or has given memory back. Raises
        EngineDeadError if it does not answer."""
        try:
            state = await line.get_state(timeout_s=self._config.health_timeout_s)
        except RequestError:  # an engine that cannot describe itself may still serve
            return self._engine.num_open > 0
        stands_still = state.paused is not None or bool(state.released)
        return self._engine.num_open > 0 or stands_still

    async def _answers_a_probe(self, line: EngineLine) -> bool:
        """Submit a one-token request; any message from the engine after that is a sign of life.
        Raises EngineDeadError."""
        pooling = self._config.pooling
        sampling = SamplingParams(max_new_tokens=1 if pooling is None else 0, temperature=0.0)
        kind = None if pooling is None else pooling.kind
        probe = Request(
            rid=f"HEALTH_CHECK_{new_rid()}",
            prompt_ids=pack_ids([0]),
            sampling=sampling,
            seed=0,
            options=RequestOptions(pooling=kind, routed_dp_rank=line.rank),
        )
        seq_id = self._engine.submit(probe, Mailbox())
        try:
            heard = await line.wait_message(timeout_s=self._config.health_timeout_s)
        finally:
            self._engine.stop(seq_id)
        return heard and line.life.is_ready
