"""The API key, as ASGI middleware: ``Authorization: Bearer KEY`` or 401 (docs/sglang/api.md#keys)."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from setpoint.frontend.http.errors import json_response

_EXEMPT = ("/health", "/ready", "/metrics")


class ApiKeyMiddleware:
    def __init__(self, app: ASGIApp, *, api_key: str) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._allows(scope):
            await json_response({"error": "Unauthorized"}, status_code=401)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _allows(self, scope: Scope) -> bool:
        if scope["method"] == "OPTIONS" or scope["path"].startswith(_EXEMPT):
            return True
        given = Headers(scope=scope).get("authorization", "")
        return hmac.compare_digest(given.encode("latin-1"), self._expected)
