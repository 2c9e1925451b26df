"""The routes of the APIs: a table for each dialect, of the methods, paths and handlers among which
Starlette chooses, and of what ``openapi`` says about them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

Handler = Callable[[Request], Awaitable[Response]]


class ApiRoute(Route):
    def __init__(
        self,
        path: str,
        handler: Handler,
        methods: Collection[str],
        *,
        tag: str | None = None,
        body: type[msgspec.Struct] | None = None,
        query: type | None = None,
    ) -> None:
        """tag: the route's group in the document; a route without one is not in it. body: the
        struct that the body is decoded to. query: the dataclass that ``queries`` makes of the
        query."""
        super().__init__(path, handler, methods=methods, include_in_schema=tag is not None)
        self.methods: set[str] = set(methods)  # without the HEAD that Starlette adds to GET
        self.tag = tag
        self.body = body
        self.query = query

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Starlette's answer, with the route in the scope: ``MeteredMiddleware`` reads its path."""
        match, found = super().matches(scope)
        if match is not Match.NONE:
            found["route"] = self
        return match, found


class Routes:
    """A dialect's routes in the order in which they are tried."""

    def __init__(self, tag: str | None = None) -> None:
        self.all: list[ApiRoute] = []
        self._tag = tag

    def tagged(self, tag: str) -> Routes:
        """The same table, for routes of this group."""
        routes = Routes(tag)
        routes.all = self.all
        return routes

    def add(
        self,
        path: str,
        handler: Handler,
        *methods: str,
        body: type[msgspec.Struct] | None = None,
        query: type | None = None,
    ) -> None:
        """Add one route for each method, because every operation of the document needs its own
        id."""
        for method in methods:
            tag = None if method == "HEAD" else self._tag
            self.all.append(ApiRoute(path, handler, [method], tag=tag, body=body, query=query))

    def add_hidden(self, path: str, handler: Handler, *methods: str) -> None:
        """Add a route that the document does not have."""
        self.all.append(ApiRoute(path, handler, methods))
