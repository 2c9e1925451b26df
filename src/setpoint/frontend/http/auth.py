"""The API key, as ASGI middleware: ``Authorization: Bearer KEY`` or 401
(docs/sglang/api.md#keys)."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from setpoint.frontend.http.errors import error_response

_EXEMPT = ("/health", "/ready", "/metrics")
_UNAUTHORIZED = error_response(
    "The API key is missing or wrong. Send it in the header 'Authorization: Bearer KEY'.",
    status_code=401,
)
_UNAUTHORIZED.headers["www-authenticate"] = "Bearer"


class ApiKeyMiddleware:
    def __init__(self, app: ASGIApp, *, api_key: str) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._allows(scope):
            await _UNAUTHORIZED(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _allows(self, scope: Scope) -> bool:
        if scope["method"] == "OPTIONS" or scope["path"].startswith(_EXEMPT):
            return True
        given = Headers(scope=scope).get("authorization", "")
        return hmac.compare_digest(given.encode("latin-1"), self._expected)
