"""The console's routes as a dialect: the page, its files, and the stream of events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from setpoint.frontend.console.broadcast import ViewerStream
from setpoint.frontend.console.event_feed import ConsoleFeed
from setpoint.frontend.console.static_pages import PAGE, Pages
from setpoint.frontend.http.api_routes import Routes
from setpoint.frontend.http.body_reader import BodyReader
from setpoint.frontend.http.dialect import Dialect
from setpoint.frontend.http.sse import named_event
from setpoint.frontend.refusal import Refusal
from setpoint.frontend.service import Service

STREAM = f"{PAGE}/stream"


class ConsoleDialect(Dialect):
    prefix = PAGE
    hint = f"The page is at {PAGE}, its events at {STREAM}."

    def __init__(self, service: Service, models: Sequence[Service], bodies: BodyReader) -> None:
        pages = Pages()
        self.pages = pages.paths
        self.routes = Routes("console")
        self._feed = ConsoleFeed(service, models, service.watch)
        self.routes.add(STREAM, self.stream, "GET")
        pages.install(self.routes)  # after the stream, whose path looks like a file's

    async def stream(self, request: Request) -> Response:
        """What the server does, live (docs/console.md)."""
        return ViewerStream(self._feed.broadcast, await self._feed.join())

    def error_body(self, refusal: Refusal) -> dict[str, Any]:
        return {"error": {"message": refusal.message, "code": refusal.status_code}}

    def stream_end(self, refusal: Refusal | None) -> bytes:
        return b"" if refusal is None else named_event("error", self.error_body(refusal))
