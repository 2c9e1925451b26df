"""The console's page and its files, as they are in the package. They hold no secret: whoever may
not see the server's figures gets them without figures."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from setpoint.frontend.http.api_routes import Handler, Routes

PAGE = "/console"
LIVE = "live"
_SOURCE = b'data-source="%s"'
STATIC = Path(__file__).parent / "static"
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
"""Scripts and styles come from this server's files alone, so that no text of a model or of a client
can become one."""
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # The browser asks each time, and after an update of the server gets the new files.
    "cache-control": "no-cache",
}


@dataclass(slots=True, frozen=True)
class File:
    content: bytes
    type: str
    tag: str
    """Changes with the content."""


@cache
def file(name: str) -> File:
    """A file of the page. Raises KeyError or OSError for one that there is not."""
    path = STATIC / name
    content = path.read_bytes()
    tag = hashlib.sha256(content).hexdigest()[:16]
    return File(content, TYPES[path.suffix], f'"{tag}"')


class Pages:
    """Routes of the page and its files."""

    def __init__(self, *, source: str = LIVE) -> None:
        """source: where the page gets what it shows: "live", or "recording" (``playback``)."""
        self._source = source
        self._names = {path.name for path in STATIC.iterdir() if path.suffix in TYPES}

    @property
    def paths(self) -> list[str]:
        return [PAGE, *(f"{PAGE}/{name}" for name in sorted(self._names))]

    @property
    def routes(self) -> list[Route]:
        """For a server that has only these and some of its own."""
        return [Route(path, handler, methods=["GET"]) for path, handler in self._handlers]

    def install(self, routes: Routes) -> None:
        for path, handler in self._handlers:
            routes.add_hidden(path, handler, "GET", "HEAD")

    @property
    def _handlers(self) -> tuple[tuple[str, Handler], ...]:
        return (PAGE, self.page), (f"{PAGE}/{{name}}", self.static)

    async def page(self, request: Request) -> Response:
        if self._source == LIVE:
            return _answer(request, "index.html")
        page = file("index.html")
        content = page.content.replace(_SOURCE % LIVE.encode(), _SOURCE % self._source.encode())
        return Response(content, media_type=page.type, headers=HEADERS)

    async def static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._names:
            raise HTTPException(404)
        return _answer(request, name)


def _answer(request: Request, name: str) -> Response:
    found = file(name)
    headers = {**HEADERS, "etag": found.tag}
    if request.headers.get("if-none-match") == found.tag:
        return Response(status_code=304, headers=headers)
    return Response(found.content, media_type=found.type, headers=headers)
