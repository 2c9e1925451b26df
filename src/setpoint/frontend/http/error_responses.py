"""Errors as HTTP responses, in the shape of the dialect that answers for the path, and the handlers
that produce them."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Scope

from setpoint.core.errors import EngineDeadError, RequestError, SetpointError
from setpoint.frontend.arrival import note_refusal
from setpoint.frontend.http.dialect import Dialects
from setpoint.frontend.http.routes import RouteHints, allowed_methods
from setpoint.frontend.jobs import ClientGoneError
from setpoint.frontend.refusal import Refusal, refusal_of

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that has closed the connection."""
UNKNOWN_URL = "unknown_url"
"""OpenAI's code for a path that no route has."""
_NO_WEBSOCKET = Refusal(
    message="This server speaks HTTP and no WebSocket; send the request with POST.",
    status_code=426,
)


def _is_websocket(request: Request) -> bool:
    """Whether the request is the handshake of a WebSocket."""
    return request.headers.get("upgrade", "").strip().lower() == "websocket"


def json_response(content: Any, *, status_code: int = 200) -> Response:
    return Response(
        msgspec.json.encode(content), status_code=status_code, media_type="application/json"
    )


def error_response(dialects: Dialects, scope: Scope, refusal: Refusal) -> Response:
    path = scope["path"]
    note_refusal(scope, refusal.message)
    response = json_response(dialects.error_body(path, refusal), status_code=refusal.status_code)
    response.headers.update(dialects.of(path).error_headers(scope))
    if refusal.retry_after_s is not None:
        response.headers["retry-after"] = str(refusal.retry_after_s)
    return response


class ErrorHandlers:
    def __init__(self, dialects: Dialects) -> None:
        self._dialects = dialects
        aliases = {path: route for each in dialects.all for path, route in each.aliases.items()}
        self._advice = RouteHints([each.prefix for each in dialects.all], aliases)

    def install(self, app: Starlette) -> None:
        app.add_exception_handler(RequestError, self._on_refusal)
        app.add_exception_handler(EngineDeadError, self._on_refusal)
        app.add_exception_handler(HTTPException, self._on_http_exception)
        app.add_exception_handler(ClientDisconnect, self._on_client_gone)
        app.add_exception_handler(ClientGoneError, self._on_client_gone)
        app.add_exception_handler(Exception, self._on_bug)

    def _respond(self, request: Request, refusal: Refusal) -> Response:
        return error_response(self._dialects, request.scope, refusal)

    async def _on_refusal(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, SetpointError)
        return self._respond(request, refusal_of(error))

    async def _on_http_exception(self, request: Request, error: Exception) -> Response:
        """Answer an HTTP exception. A 404 or 405 of the router names the route that was probably
        meant; others keep their own message."""
        assert isinstance(error, HTTPException)
        if error.status_code == 405 and _is_websocket(request):
            response = self._respond(request, _NO_WEBSOCKET)
            response.headers.update({"upgrade": "HTTP/1.1", "connection": "upgrade"})
            return response
        hint = self._dialects.of(request.url.path).hint
        refusal = Refusal(
            message=self._advice.on(request, error.status_code, hint=hint) or str(error.detail),
            status_code=error.status_code,
            code=UNKNOWN_URL if error.status_code == 404 else None,
        )
        response = self._respond(request, refusal)
        response.headers.update(error.headers or {})
        if error.status_code == 405:
            allowed = allowed_methods(request.scope, request.app.routes)
            response.headers["allow"] = ", ".join(allowed)
        return response

    async def _on_client_gone(self, request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def _on_bug(self, request: Request, error: Exception) -> Response:
        # The framework raises the error again after this answer, so the server logs its traceback.
        return self._respond(
            request,
            Refusal(
                message="Internal server error; the server's log has the details.",
                status_code=500,
            ),
        )
