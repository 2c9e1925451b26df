"""``/metrics``, for Prometheus (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from setpoint.frontend.http.api_routes import Routes
from setpoint.frontend.metrics_page import metrics_page
from setpoint.frontend.service import Service

METRICS_ROUTE = "/metrics"


class MetricsRoutes:
    def __init__(self, models: Sequence[Service]) -> None:
        """models: all models of the server."""
        self._models = models

    def install(self, parent: Routes) -> None:
        routes = parent.tagged("admin")
        routes.add(METRICS_ROUTE, self.metrics, "GET", "HEAD")

    async def metrics(self, request: Request) -> Response:
        page, content_type = await metrics_page(self._models, request.headers.get("accept", ""))
        return Response(page, headers={"content-type": content_type})
