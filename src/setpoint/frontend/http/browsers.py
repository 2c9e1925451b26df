"""Keeps web pages from driving a server that only its own machine is meant to reach; ASGI
middleware.

A browser lets every page it shows send requests to 127.0.0.1, so a server that listens there
without an API key would be open to the whole web. A page cannot forge the headers Host, Origin and
Sec-Fetch-Site, and only browsers send the last two. Two kinds of requests are refused with 403:
those of a page from another site (Origin), and those that a browser sends here because a foreign
DNS name resolves to the address of this machine (Host: "DNS rebinding"). Pictures, scripts and
streams that a page of another site asks for without an Origin are refused, too. Programs on the
server's own machine are not kept out: all of them may send requests.
"""

from __future__ import annotations

import ipaddress
import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from setpoint.core.excerpt import quoted
from setpoint.frontend.http.dialect import Dialects
from setpoint.frontend.http.error_responses import error_response
from setpoint.frontend.refusal import Refusal

_HOST = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<name>[\w.-]+))(?::[0-9]*)?")
_ORIGIN = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<host>[^/?#]*)")
_OF_THE_NET = frozenset(("ftp", "ftps", "gopher", "ws", "wss", "data", "blob", "javascript"))
"""Schemes of what comes from elsewhere, besides http and https."""

_PRIVATE_SUFFIXES = (".localhost", ".local", ".internal")
"""Suffixes under which no name can be registered; containers reach their host as
host.docker.internal."""


class LocalOnlyMiddleware:
    def __init__(self, app: ASGIApp, *, dialects: Dialects) -> None:
        self._app = app
        self._dialects = dialects
        # Browsers send no Origin with the GET of a link or an image.
        self._changed_by_get = {path for each in dialects.all for path in each.changed_by_get}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reason = self._reason(scope) if scope["type"] == "http" else None
        if reason is None:
            await self._app(scope, receive, send)
            return
        message = (
            f"{reason} This server listens on this machine only and has no API key, so it answers"
            " this machine only; see --api-key."
        )
        refusal = Refusal(message=message, status_code=403)
        await error_response(self._dialects, scope, refusal)(scope, receive, send)

    def _reason(self, scope: Scope) -> str | None:
        """Why the request is refused, or None."""
        changes = scope["path"] in self._changed_by_get
        return _refusal(Headers(scope=scope), changes_by_get=changes)


def _refusal(headers: Headers, *, changes_by_get: bool) -> str | None:
    host, origin = headers.get("host"), headers.get("origin")
    if host and not _is_private(_name_in(host)):
        return f"The Host header names {quoted(host)}, which is not this machine."
    if origin is not None and not _is_local_page(origin):
        return f"The request comes from a web page of {quoted(origin)}."
    # A link that the user follows shows a page, which the other site cannot read.
    is_shown = headers.get("sec-fetch-mode") == "navigate" and not changes_by_get
    if origin is None and headers.get("sec-fetch-site") == "cross-site" and not is_shown:
        return "The request comes from a web page of another site."
    return None


def _is_local_page(origin: str) -> bool:
    """Whether the page is this machine's, or belongs to an app or extension that the user has
    installed (app://, tauri://, chrome-extension://)."""
    if origin == "null":  # a sandboxed frame, which any page can contain
        return False
    found = _ORIGIN.fullmatch(origin)
    if found is None:
        return False
    scheme = found["scheme"].lower()
    if scheme not in ("http", "https"):
        return scheme not in _OF_THE_NET
    name = _name_in(found["host"])
    address = _address(name)
    return (
        address.is_loopback
        if address is not None
        else name == "localhost" or name.endswith(".localhost")
    )


def _is_private(name: str) -> bool:
    """Whether no foreign DNS server can answer for the host: it is an address, a name without a
    dot, or a name under a suffix that cannot be registered."""
    return _address(name) is not None or "." not in name or name.endswith(_PRIVATE_SUFFIXES)


def _name_in(host: str) -> str:
    """The name or address in "host:port", or a value that matches nothing."""
    found = _HOST.fullmatch(host)
    return "no.name" if found is None else (found["six"] or found["name"]).lower().rstrip(".")


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
