"""Checks API keys, as ASGI middleware. A request needs ``Authorization: Bearer KEY`` or a dialect's
own header, and is otherwise answered 401; a client's key where the admin key is needed is answered
403 (docs/sglang/api.md#keys)."""

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
_NO_ADMIN = Refusal(
    message="This route is for the server's operator and needs the admin key (--admin-api-key),"
    " which is missing or wrong. Send it in the header 'Authorization: Bearer KEY'.",
    status_code=401,
)
_FORBIDDEN = Refusal(
    message="This route is for the server's operator and needs the admin key (--admin-api-key).",
    status_code=403,
)


class ApiKeyMiddleware:
    """Checks the keys; the server has at least one. The admin key opens every route. If there is an
    admin key, only this key opens the operator's routes. Without ``api_keys``, the other routes are
    open to everybody."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_keys: Sequence[str],
        admin_api_key: str | None,
        dialects: Dialects,
    ) -> None:
        self._app = app
        self._dialects = dialects
        self._public = tuple(path for dialect in dialects.all for path in dialect.public)
        self._pages = frozenset(path for dialect in dialects.all for path in dialect.pages)
        admin = [path for dialect in dialects.all for path in dialect.admin]
        self._admin = frozenset(path for path in admin if "{" not in path)
        self._admin_below = tuple(path.partition("{")[0] for path in admin if "{" in path)
        self._headers = [each.key_header for each in dialects.all if each.key_header]
        self._keys = [key.encode() for key in api_keys]
        self._admin_keys = [] if admin_api_key is None else [admin_api_key.encode()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
            return
        response = error_response(self._dialects, scope, refusal)
        if refusal.status_code == 401:
            response.headers["www-authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refusal | None:
        path = scope["path"]
        is_open = path in self._pages or path.startswith(self._public)
        if scope["method"] == "OPTIONS" or is_open:
            return None
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = [key] if scheme.lower() == "bearer" else []  # RFC 9110, 11.1: in any case
        given += [headers[name] for name in self._headers if name in headers]
        is_client = _has(given, self._keys)
        if _has(given, self._admin_keys):
            return None
        is_admins = path in self._admin or path.startswith(self._admin_below)
        if self._admin_keys and is_admins:
            return _FORBIDDEN if is_client else _NO_ADMIN
        return None if is_client or not self._keys else _UNAUTHORIZED


def _has(given: Sequence[str], expected: Sequence[bytes]) -> bool:
    return any(
        hmac.compare_digest(each.encode("latin-1"), key) for each in given for key in expected
    )
