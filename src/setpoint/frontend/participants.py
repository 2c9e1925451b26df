"""The engines that take part in something that goes on between two calls of a client, such as a
profile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from setpoint.core.errors import EngineDeadError, RequestError
from setpoint.ipc.client import EngineClient
from setpoint.ipc.line import EngineLine

T = TypeVar("T")


class Participants:
    """An engine that is started later takes no part: it is asked for nothing."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._lines: list[EngineLine] = []
        """The engines that have begun, even if they have ended."""

    async def begin(
        self,
        call: Callable[[EngineLine], Awaitable[T]],
        undo: Callable[[EngineLine], Awaitable[object]],
    ) -> list[T]:
        """Have all engines begin. If one refuses, those that have begun are to ``undo`` it; raises
        its refusal."""
        begun: list[EngineLine] = []

        async def begin(line: EngineLine) -> T:
            done = await call(line)
            begun.append(line)
            return done

        async def end(line: EngineLine) -> None:
            with suppress(RequestError, EngineDeadError):
                await undo(line)

        try:
            done = await self._engine.on_all(begin)
        except (RequestError, EngineDeadError):
            await asyncio.gather(*map(end, begun))
            raise
        self._lines = begun
        return done

    async def on_all(self, call: Callable[[EngineLine], Awaitable[T]]) -> list[T]:
        """The answers of those that have begun and live; of all engines if there is none, which
        then say why they refuse."""
        return await self._engine.on_all(call, self._living() or None)

    def losses(self) -> str:
        """A sentence about engines that have ended since they began; "" if none has."""
        lost = sorted({line.rank for line in self._lines} - {line.rank for line in self._living()})
        if not lost:
            return ""
        if len(lost) == 1:
            return f" Engine {lost[0]} has ended since the start, and its part is lost."
        ranks = ", ".join(map(str, lost))
        return f" The engines {ranks} have ended since the start, and their parts are lost."

    def _living(self) -> list[EngineLine]:
        return sorted(
            (each for each in self._lines if not each.life.has_ended), key=lambda x: x.rank
        )
