"""``GET /doctor``: what limits this server, and what to change
(docs/doctor.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from setpoint.core.errors import EngineDeadError, RequestError
from setpoint.frontend.http.api_routes import Routes
from setpoint.frontend.http.error_responses import json_response
from setpoint.frontend.http.queries import read_query
from setpoint.frontend.info import Info
from setpoint.frontend.telemetry.watching import WINDOW_S, Watch


@dataclass(slots=True, frozen=True)
class DoctorQuery:
    seconds: float = WINDOW_S
    moments: bool = False
    dp_rank: int | None = None


class DoctorRoutes:
    def __init__(self, watch: Watch, info: Info) -> None:
        self._watch = watch
        self._info = info

    def install(self, parent: Routes) -> None:
        routes = parent.tagged("admin")
        routes.add("/doctor", self.doctor, "GET", "HEAD", query=DoctorQuery)

    async def doctor(self, request: Request) -> Response:
        """The report about the last ``seconds``; at most ten minutes are stored. moments: whether
        to add the moments that the report is about, and the server's facts. dp_rank: the engine
        that the report is about; all engines if not given."""
        query = read_query(request, DoctorQuery)
        seconds, dp_rank = query.seconds, query.dp_rank
        if not (seconds > 0 and math.isfinite(seconds)):
            raise RequestError(f"seconds must be a positive number, got {seconds}.")
        if self._watch.doctor is None:
            raise RequestError("This server has no doctor.", status_code=404)
        num_ranks = len(self._info.engine.lines)
        if dp_rank is not None and not 0 <= dp_rank < max(num_ranks, 1):
            raise RequestError(
                f"dp_rank is {dp_rank}; this server has the ranks 0 to {num_ranks - 1}."
            )
        found = await self._watch.examine(seconds, dp_rank)
        if found is None:
            raise EngineDeadError("There is no engine yet.")
        answer = dict(found.diagnosis.report)
        if query.moments:
            first, deaths = found.lives[0], [life.death for life in found.lives]
            answer["moments"] = found.moments
            answer["server_info"] = self._info.known(first.line)
            answer["tiers"] = first.tiers
            answer["ended"] = deaths[0] if all(deaths) else ""
        return json_response(answer)
