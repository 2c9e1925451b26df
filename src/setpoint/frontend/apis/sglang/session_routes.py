"""Routes that open and close sessions (docs/controls.md#sessions)."""

from __future__ import annotations

from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from setpoint.core.bounds import INT32_MAX
from setpoint.frontend.apis.sglang.controls import ControlBodies
from setpoint.frontend.http.api_routes import Routes
from setpoint.frontend.http.error_responses import json_response
from setpoint.frontend.intake import check_rid
from setpoint.frontend.sessions import Sessions


class OpenSessionBody(msgspec.Struct):
    capacity_of_str_len: Annotated[int, msgspec.Meta(ge=1, le=INT32_MAX)]
    """Maximum number of tokens that the session keeps."""
    session_id: str | None = None
    timeout: Annotated[float, msgspec.Meta(gt=0, le=1e9)] | None = None
    """Seconds without a request after which the session is closed."""


class CloseSessionBody(msgspec.Struct):
    session_id: str


class SessionRoutes:
    def __init__(self, sessions: Sessions, bodies: ControlBodies) -> None:
        self._sessions = sessions
        self._bodies = bodies

    def install(self, parent: Routes) -> None:
        routes = parent.tagged("native")
        routes.add("/open_session", self.open, "POST", body=OpenSessionBody)
        routes.add("/close_session", self.close, "POST", body=CloseSessionBody)

    async def open(self, request: Request) -> Response:
        """Open a session. The answer is its id, as a JSON string."""
        body, _ = await self._bodies.read(request, OpenSessionBody, unsupported=("streaming",))
        if body.session_id is not None:
            check_rid(body.session_id, "session_id")
        session_id = self._sessions.open(
            body.session_id, capacity=body.capacity_of_str_len, timeout_s=body.timeout
        )
        return json_response(session_id)

    async def close(self, request: Request) -> Response:
        body, _ = await self._bodies.read(request, CloseSessionBody)
        self._sessions.close(body.session_id)
        return Response(status_code=200)
