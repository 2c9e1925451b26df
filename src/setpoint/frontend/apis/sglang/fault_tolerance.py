"""Routes with which an operator or an orchestrator sees the engines and gives instructions about
them (docs/controls.md#engines-of-a-server).

Paths, instructions and bodies are those that SGLang and vLLM propose (sgl-project/sglang#40078,
vllm-project/vllm#46370). In those engines, ranks wait for an instruction after a fault. In Setpoint
they recover by themselves, and the instructions do what recovery leaves to people.
"""

from __future__ import annotations

from typing import Any, Literal
from uuid import uuid4

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from setpoint.core.control import PauseMode
from setpoint.core.errors import RequestError
from setpoint.core.standing import Standing
from setpoint.frontend.apis.sglang.controls import ControlBodies
from setpoint.frontend.http.api_routes import Routes
from setpoint.frontend.http.error_responses import json_response
from setpoint.frontend.intake import check_rid
from setpoint.frontend.service import Service

PREFIXES = ("/fault_tolerance", "/v1/fault_tolerance")
"""The first path is that of the first proposals, the second that of the current ones."""
PATHS = tuple(f"{prefix}/{name}" for prefix in PREFIXES for name in ("status", "apply"))
SCHEMA_VERSION = 1


class ApplyParams(msgspec.Struct, forbid_unknown_fields=True):
    """A misspelt key would make the instruction one about all ranks, so it is refused."""

    dp_ranks: list[int] | None = None
    """The ranks to pause or to retry; None: all ranks."""
    removed_dp_ranks: list[int] | None = None
    """The ranks to take out of service."""
    timeout: float | None = None
    """Accepted because the proposals have it, and ignored: in the engines that they are for, ranks
    wait so long for an instruction."""


class ApplyBody(msgspec.Struct):
    instruction: Literal["pause", "retry", "scale_down"]
    params: ApplyParams = msgspec.field(default_factory=ApplyParams)
    request_id: str | None = None
    """The name of the instruction in the status; if None, the server generates one."""


class FaultToleranceRoutes:
    def __init__(self, service: Service, bodies: ControlBodies) -> None:
        self._service = service
        self._engine = service.engine
        self._supervisor = service.supervisor
        self._bodies = bodies
        self._applied: dict[int, tuple[str, str]] = {}
        """Rank -> name and instruction of the last body about it."""
        self._last_id: str | None = None

    def install(self, parent: Routes) -> None:
        routes = parent.tagged("control")
        for prefix in PREFIXES:
            routes.add(f"{prefix}/status", self.status, "GET", "HEAD")
            routes.add(f"{prefix}/apply", self.apply, "POST", body=ApplyBody)

    async def status(self, request: Request) -> Response:
        standings, lives = self._engine.standings(), self._engine.lives
        return json_response(
            {
                "schema_version": SCHEMA_VERSION,
                "total_engines": len(standings),
                "engines": [self._entry(each) for each in standings],
                "last_ft_request_id": self._last_id,
                "num_waiting": self._engine.num_waiting,
                "max_engine_restarts": lives.restarts.most,
                "restarts_left": lives.restarts.left,
                "standby": lives.standby,
                "standby_death": lives.standby_death,
            }
        )

    def _entry(self, standing: Standing) -> dict[str, Any]:
        request_id, instruction = self._applied.get(standing.dp_rank, (None, ""))
        status = _status(standing)
        failed = instruction == "retry" and status == "dead"
        return {
            "id": standing.dp_rank,
            "status": status,
            "state": standing.state,
            "paused": standing.paused,
            "pid": standing.pid,
            "num_requests": standing.num_requests,
            "num_restarts": standing.num_restarts,
            "last_death": standing.death,
            "last_ft_request_id": request_id,
            **({"ft_error": standing.death} if failed else {}),
        }

    async def apply(self, request: Request) -> Response:
        """Carry out an instruction. Answers 202, as in the proposals: a pause is then in force, and
        a rank that was taken out of service has no requests left. The status shows engines that are
        still starting or ending."""
        body, told = await self._bodies.read(request, ApplyBody)
        request_id = str(uuid4()) if body.request_id is None else body.request_id
        check_rid(request_id, "request_id")
        ranks = self._ranks(body)
        match body.instruction:
            case "pause":
                await self._engine.orders.pause(PauseMode.IN_PLACE, ranks)
            case "retry":
                self._supervisor.retry(ranks)
                await self._engine.orders.resume(ranks)
            case "scale_down":
                self._supervisor.scale_down(ranks)
        self._last_id = request_id
        self._applied |= dict.fromkeys(ranks, (request_id, body.instruction))
        if body.params.timeout is not None:
            told = {"warnings": [*told.get("warnings", ()), "params.timeout has no effect here."]}
        message = (
            f"{body.instruction} is applied; {PREFIXES[0]}/status shows the state of the engines."
        )
        return json_response(
            {"message": message, "request_id": request_id, "dp_ranks": ranks, **told},
            status_code=202,
        )

    def _ranks(self, body: ApplyBody) -> list[int]:
        """The ranks that the body is about, in order. Raises RequestError for an invalid rank."""
        removes = body.instruction == "scale_down"
        names = ("removed_dp_ranks", "dp_ranks")
        name, other = names if removes else names[::-1]
        if getattr(body.params, other) is not None:
            raise RequestError(
                f"params.{other} has no meaning for {body.instruction}; use params.{name}."
            )
        wanted, known = getattr(body.params, name), range(len(self._engine.lines))
        if wanted is None and not removes:
            return list(known)
        if not wanted:
            raise RequestError(f"params.{name} must name at least one rank.")
        for rank in wanted:
            if rank not in known:
                raise RequestError(
                    f"params.{name} has {rank}; this server has the ranks 0 to {known[-1]}."
                )
        return sorted(set(wanted))


def _status(standing: Standing) -> str:
    """The state of an engine in the words of the proposals."""
    if standing.state == "ready":
        return "healthy" if standing.paused is None else "paused"
    return "dead" if standing.state == "ended" else "unhealthy"
