"""Counts HTTP requests and responses; ASGI middleware of a server with --enable-metrics."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from setpoint.frontend.telemetry.metrics.http_counts import HttpMetrics

UNMATCHED = "unmatched"
"""The label of a path that no route serves: a client could send any number of different ones."""
_METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH")
OTHER = "other"


class MeteredMiddleware:
    def __init__(self, app: ASGIApp, *, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        metrics, status = self._metrics, "none"
        method = scope["method"] if scope["method"] in _METHODS else OTHER

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        metrics.num_active += 1
        try:
            await self._app(scope, receive, counted)
        except Exception:
            status = "500"  # the framework answers it, outside of this middleware
            raise
        finally:
            metrics.num_active -= 1
            # The router has put the route into the scope; its path has the names of parameters in
            # place of their values.
            route = getattr(scope.get("route"), "path", UNMATCHED)
            metrics.requests[route, method] += 1
            if status != "none":
                metrics.responses[route, status, method] += 1
