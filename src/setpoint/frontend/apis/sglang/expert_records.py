"""Routes that record which experts tokens use (docs/controls.md)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from setpoint.core.operations import RecordExperts
from setpoint.frontend.http.api_routes import Routes
from setpoint.frontend.participants import Participants
from setpoint.frontend.service import Service

PATHS = tuple(f"/{word}_expert_distribution_record" for word in ("start", "stop", "dump"))


class ExpertRecordRoutes:
    def __init__(self, service: Service) -> None:
        self._engine = service.engine
        self._recorded = Participants(service.engine)
        self._folder = Path(service.config.expert_records_folder)

    def install(self, parent: Routes) -> None:
        routes = parent.tagged("control")
        for path, act in zip(PATHS, (self.start, self.stop, self.dump), strict=True):
            routes.add(path, act, "GET", "POST")

    async def start(self, request: Request) -> Response:
        await self._operate("start")
        return PlainTextResponse("Start recording expert distribution.\n")

    async def stop(self, request: Request) -> Response:
        await self._operate("stop")
        return PlainTextResponse(f"Stop recording expert distribution.{self._recorded.losses()}\n")

    async def dump(self, request: Request) -> Response:
        path = self._folder / f"expert_distribution_recorder_{time.time():.6f}.json"
        files = ", ".join(await self._operate("dump", path))
        losses = self._recorded.losses()
        return PlainTextResponse(f"Dump expert distribution record to {files}{losses}\n")

    async def _operate(
        self, action: Literal["start", "stop", "dump"], path: Path | None = None
    ) -> list[str]:
        """Have every engine do it; returns the files that they write. Engines that compute in step
        each count the tokens of all of them, so only one of these does it."""
        several, line = len(self._engine.lines) > 1, self._engine.choose()
        if self._engine.lives.in_step:
            return [(await line.operate(RecordExperts(action, str(path or "")))).path]

        def path_of(rank: int) -> str:
            if path is None:
                return ""
            return str(path.with_stem(f"{path.stem}-DP{rank}") if several else path)

        if action == "start":
            done = await self._recorded.begin(
                lambda line: line.operate(RecordExperts(action)),
                undo=lambda line: line.operate(RecordExperts("stop")),
            )
        else:
            done = await self._recorded.on_all(
                lambda line: line.operate(RecordExperts(action, path_of(line.rank)))
            )
        return [each.path for each in done]
