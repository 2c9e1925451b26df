"""Answers a request whose path or method no route has with the route that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import RedirectResponse
from starlette.routing import BaseRoute, Match, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from setpoint.core.excerpt import excerpt

_SHOWN_CHARS = 100


class RouteHints:
    """prefixes: beginnings of paths that people leave out or write twice. aliases: path of another
    API -> the route here that does the same."""

    def __init__(self, prefixes: Sequence[str], aliases: Mapping[str, str]) -> None:
        self._prefixes = [prefix for prefix in prefixes if prefix]
        self._aliases = aliases

    def on(self, request: Request, status_code: int, *, hint: str) -> str | None:
        """The message of a 404 or 405 that no handler made itself; None for anything else. hint:
        advice for a path that no route resembles."""
        path, methods = request.url.path, _methods(request.app.routes)
        if status_code == 404 and path not in methods:
            meant = self.nearest(path, methods)
            way = f". {hint}" if meant is None else f"; did you mean {meant}?"
            return f"There is no route {excerpt(path, _SHOWN_CHARS)}{way}"
        if status_code == 405 and path in methods:
            return (
                f"{excerpt(path, _SHOWN_CHARS)} does not take {request.method}; use"
                f" {' or '.join(sorted(methods[path] - {'HEAD'}))}."
            )
        return None

    def nearest(self, path: str, known: Iterable[str]) -> str | None:
        """The route that was probably meant by ``path``, if one is similar: people leave a prefix
        out or write it twice, use a path of another API, and misspell."""
        routes = sorted(route for route in known if "{" not in route)
        bare = "/" + path.strip("/")
        for prefix in self._prefixes:
            while bare.startswith(f"{prefix}{prefix}/"):
                bare = bare.removeprefix(prefix)
        candidates = [bare, *(f"{prefix}{bare}" for prefix in self._prefixes)]
        for candidate in (*candidates, *map(self._aliases.get, candidates)):
            if candidate in routes:
                return candidate
        # Short paths (/health, /generate) are compared as a whole, long ones by their end, because
        # many begin alike.
        named = [route for route in routes if route != "/"]
        return next(iter(difflib.get_close_matches(bare, named, n=1, cutoff=0.75)), None)


def allowed_methods(scope: Scope, routes: Iterable[BaseRoute]) -> list[str]:
    """The methods of a path, each of which may have a route of its own."""
    found: set[str] = set()
    for route in routes:
        if route.matches(scope)[0] is not Match.NONE:
            found |= getattr(route, "methods", None) or set()
    return sorted(found)


def led_to_slashes(router: Router) -> ASGIApp:
    """The end of a router, for paths that no route has: if only a slash at the end is too much or
    missing, the client is led to the route. The place is a path: the client's own words about the
    host and the proxy's scheme must not get into it."""
    otherwise = router.default

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        other = path.rstrip("/") if path.endswith("/") else f"{path}/"
        meant = {**scope, "path": other}
        if scope["type"] == "http" and any(
            route.matches(meant)[0] is not Match.NONE for route in router.routes
        ):
            query = scope["query_string"].decode("latin-1")
            place = quote(other) + (f"?{query}" if query else "")
            await RedirectResponse(place)(scope, receive, send)
        else:
            await otherwise(scope, receive, send)

    return answer


def _methods(routes: Iterable[Any]) -> dict[str, set[str]]:
    """Path -> its methods."""
    found: dict[str, set[str]] = {}
    for route in routes:
        found.setdefault(route.path, set()).update(route.methods or ())
    return found
