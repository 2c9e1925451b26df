"""The API key, as ASGI middleware: ``Authorization: Bearer KEY``, the header of a dialect, or 401
(docs/sglang/api.md#keys)."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from setpoint.frontend.http.dialect import Dialects
from setpoint.frontend.http.errors import error_response
from setpoint.frontend.refusal import Refusal

_UNAUTHORIZED = Refusal(
    message="The API key is missing or wrong. Send it in the header 'Authorization: Bearer KEY'.",
    status_code=401,
)


class ApiKeyMiddleware:
    def __init__(self, app: ASGIApp, *, api_key: str, dialects: Dialects) -> None:
        self._app = app
        self._dialects = dialects
        self._public = tuple(path for dialect in dialects.all for path in dialect.public)
        named = {dialect.key_header for dialect in dialects.all if dialect.key_header}
        self._expected = {"authorization": f"Bearer {api_key}".encode()}
        self._expected |= {header: api_key.encode() for header in named}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._allows(scope):
            response = error_response(self._dialects, scope["path"], _UNAUTHORIZED)
            response.headers["www-authenticate"] = "Bearer"
            await response(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _allows(self, scope: Scope) -> bool:
        if scope["method"] == "OPTIONS" or scope["path"].startswith(self._public):
            return True
        headers = Headers(scope=scope)
        return any(
            hmac.compare_digest(headers.get(header, "").encode("latin-1"), expected)
            for header, expected in self._expected.items()
        )
