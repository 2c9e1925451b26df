"""Routes that control a running engine (docs/controls.md)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from setpoint.core.control import PauseMode
from setpoint.frontend.bodies import BodyParser
from setpoint.frontend.http.api_routes import Routes
from setpoint.frontend.http.body_reader import BodyReader
from setpoint.frontend.http.error_responses import json_response
from setpoint.frontend.service import Service

T = TypeVar("T", bound=msgspec.Struct)


class PauseBody(msgspec.Struct):
    mode: PauseMode = PauseMode.ABORT


class ContinueBody(msgspec.Struct):
    torch_empty_cache: bool = True
    """Accepted without effect: torch's cache holds none of the engine's memory."""


class ControlBodies:
    """Reads the bodies of control routes."""

    def __init__(self, parser: BodyParser, bodies: BodyReader) -> None:
        self._parser = parser
        self._bodies = bodies

    async def read(
        self, request: Request, kind: type[T], *, unsupported: Iterable[str] = ()
    ) -> tuple[T, dict[str, Any]]:
        """The body as ``kind``, and a part of the answer with the warnings about it. unsupported:
        keys that cannot be honoured."""

        async def work(raw: dict[str, Any]) -> tuple[T, list[str]]:
            return self._parser.read(raw, kind, route=request.url.path, unsupported=unsupported)

        body, warnings = await self._bodies.read(request, work)
        return body, {"warnings": warnings} if warnings else {}

    async def read_if_any(
        self, request: Request, kind: type[T], *, unsupported: Iterable[str]
    ) -> T:
        """The body as ``kind``; an empty body counts as an empty object. unsupported: keys that
        cannot be honoured."""

        async def work(raw: dict[str, Any]) -> T:
            return self._parser.read(raw, kind, route=request.url.path, unsupported=unsupported)[0]

        headers = request.headers
        if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
            return await work({})
        return await self._bodies.read(request, work)


class ControlRoutes:
    def __init__(self, service: Service, bodies: ControlBodies) -> None:
        self._bodies = bodies
        self._engine = service.engine

    def install(self, parent: Routes) -> None:
        routes = parent.tagged("control")
        routes.add("/pause_generation", self.pause, "POST", body=PauseBody)
        routes.add("/continue_generation", self.resume, "POST", body=ContinueBody)

    async def pause(self, request: Request) -> Response:
        body, told = await self._bodies.read(request, PauseBody)
        num_paused = await self._engine.orders.pause(body.mode)
        message = "Generation paused successfully."
        answer = {"message": message, "status": "ok", "num_paused_reqs": num_paused}
        return json_response({**answer, **told})

    async def resume(self, request: Request) -> Response:
        _, told = await self._bodies.read(request, ContinueBody)
        await self._engine.orders.resume()
        message = "Generation continued successfully."
        return json_response({"message": message, "status": "ok", **told})
