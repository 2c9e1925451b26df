"""What to answer a request whose path or method no route has: the route that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Any

from fastapi import Request

from setpoint.core.shown import shown

_KNOWN_ELSEWHERE = {
    "/v1/messages": "/v1/chat/completions",
    "/v1/responses": "/v1/chat/completions",
    "/api/chat": "/v1/chat/completions",
    "/api/generate": "/v1/completions",
    "/api/embed": "/v1/embeddings",
    "/api/embeddings": "/v1/embeddings",
    "/api/tags": "/v1/models",
}
"""Routes of other APIs (Anthropic's, OpenAI's newer one, Ollama's) and the route here that does the
same work."""
_CHAT_ROUTE = "/v1/chat/completions"
_SHOWN_CHARS = 100


def advice_for(request: Request, status_code: int) -> str | None:
    """The message of a 404 or 405 that no handler made itself; None for anything else."""
    path, methods = request.url.path, _methods(request.app.routes)
    if status_code == 404 and path not in methods:
        return _no_route(path, methods)
    if status_code == 405 and path in methods:
        return (
            f"{shown(path, _SHOWN_CHARS)} does not take {request.method}; use"
            f" {' or '.join(sorted(methods[path] - {'HEAD'}))}."
        )
    return None


def _no_route(path: str, known: Iterable[str]) -> str:
    refusal = f"There is no route {shown(path, _SHOWN_CHARS)}"
    meant = nearest(path, known)
    if meant is None:
        return f"{refusal}. Chats go to {_CHAT_ROUTE}; /docs lists every route."
    return f"{refusal}; did you mean {meant}?"


def nearest(path: str, known: Iterable[str]) -> str | None:
    """The route that ``path`` was probably meant to be, if one is near.

    People leave ``/v1`` out or write it twice, bring the path of another API, and misspell.
    """
    routes = sorted(route for route in known if "{" not in route)
    bare = "/" + path.strip("/")
    while bare.startswith("/v1/v1/"):
        bare = bare.removeprefix("/v1")
    for candidate in (
        bare,
        f"/v1{bare}",
        _KNOWN_ELSEWHERE.get(bare),
        _KNOWN_ELSEWHERE.get(f"/v1{bare}"),
    ):
        if candidate in routes:
            return candidate
    # Short paths (/health, /generate) have their whole name to compare, long ones their end:
    # everything begins with /v1.
    return next(
        iter(
            difflib.get_close_matches(
                bare, [route for route in routes if route != "/"], n=1, cutoff=0.75
            )
        ),
        None,
    )


def _methods(routes: Iterable[Any]) -> dict[str, set[str]]:
    """Path -> methods."""
    found: dict[str, set[str]] = {}
    for route in each_route(routes):
        found.setdefault(route.path, set()).update(getattr(route, "methods", None) or ())
    return found


def each_route(routes: Iterable[Any]) -> Iterator[Any]:
    """Every route itself: newer FastAPI keeps an included router as one entry."""
    for route in routes:
        router = getattr(route, "original_router", None)
        yield from (route,) if router is None else each_route(router.routes)
