"""``GET /doctor``: what limits this server, and what to change
(docs/doctor.md)."""

from __future__ import annotations

import math

from fastapi import APIRouter, Response

from setpoint.core.errors import EngineDeadError, RequestError
from setpoint.frontend.http.error_responses import json_response
from setpoint.frontend.http.openapi import add_route
from setpoint.frontend.service import Service
from setpoint.frontend.telemetry.watching import WINDOW_S


class DoctorRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service

    def install(self, parent: APIRouter) -> None:
        router = APIRouter(tags=["admin"])
        add_route(router, "/doctor", self.doctor, "GET", "HEAD")
        parent.include_router(router)

    async def doctor(self, seconds: float = WINDOW_S, moments: bool = False) -> Response:
        """The report about the last ``seconds``, of which at most ten minutes are known. moments:
        whether to add the moments that it is about, and the server's facts."""
        if not (seconds > 0 and math.isfinite(seconds)):
            raise RequestError(f"seconds is {seconds}; it must be a positive number.")
        service = self._service
        if service.watch.doctor is None:
            raise RequestError("This server has no doctor.", status_code=404)
        found = await service.watch.examine(seconds)
        if found is None:
            raise EngineDeadError("There is no engine yet.")
        diagnosis, seen, life = found
        answer = dict(diagnosis.report)
        if moments:
            answer["moments"] = seen
            answer["server_info"] = service.known_info(life.line)
            answer["ended"] = life.death
        return json_response(answer)
