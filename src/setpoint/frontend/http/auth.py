"""The API keys, as ASGI middleware: ``Authorization: Bearer KEY`` or a dialect's own header, or
401; 403 for a client's key where the admin's is needed (docs/sglang/api.md#keys)."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from setpoint.frontend.http.dialect import Dialects
from setpoint.frontend.http.error_responses import error_response
from setpoint.frontend.refusal import Refusal

_UNAUTHORIZED = Refusal(
    message="The API key is missing or wrong. Send it in the header 'Authorization: Bearer KEY'.",
    status_code=401,
)
_FORBIDDEN = Refusal(
    message="This route is for the server's operator and needs the admin key (--admin-api-key).",
    status_code=403,
)


class ApiKeyMiddleware:
    """Checks the keys, at least one of which is given. The admin's key opens every route. If there
    is one, it alone opens the routes for operators. Without an ``api_key``, the other
    routes are open to everybody."""

    def __init__(
        self, app: ASGIApp, *, api_key: str | None, admin_api_key: str | None, dialects: Dialects
    ) -> None:
        self._app = app
        self._dialects = dialects
        self._public = tuple(path for dialect in dialects.all for path in dialect.public)
        self._pages = frozenset(path for dialect in dialects.all for path in dialect.pages)
        self._admin = frozenset(path for dialect in dialects.all for path in dialect.admin)
        self._headers = [each.key_header for each in dialects.all if each.key_header]
        self._key = None if api_key is None else f"Bearer {api_key}".encode()
        self._admin_key = None if admin_api_key is None else f"Bearer {admin_api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
            return
        response = error_response(self._dialects, scope, refusal)
        if refusal is _UNAUTHORIZED:
            response.headers["www-authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refusal | None:
        path = scope["path"]
        is_open = path in self._pages or path.startswith(self._public)
        if scope["method"] == "OPTIONS" or is_open:
            return None
        headers = Headers(scope=scope)
        given = [headers.get("authorization", "")]
        given += [f"Bearer {headers[name]}" for name in self._headers if name in headers]
        is_client = _has(given, self._key)
        if _has(given, self._admin_key):
            return None
        if self._admin_key is not None and path in self._admin:
            return _FORBIDDEN if is_client else _UNAUTHORIZED
        return None if is_client or self._key is None else _UNAUTHORIZED


def _has(given: Sequence[str], expected: bytes | None) -> bool:
    return expected is not None and any(
        hmac.compare_digest(each.encode("latin-1"), expected) for each in given
    )
