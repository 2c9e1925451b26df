"""``/metrics``, for Prometheus (docs/metrics.md)."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from setpoint.core.errors import RequestError
from setpoint.frontend.http.openapi import add_route
from setpoint.frontend.service import Service

METRICS_ROUTE = "/metrics"


class MetricsRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service

    def install(self, parent: APIRouter) -> None:
        router = APIRouter(tags=["admin"])
        add_route(router, METRICS_ROUTE, self.metrics, "GET", "HEAD")
        parent.include_router(router)

    async def metrics(self, request: Request) -> Response:
        metrics = self._service.metrics
        if metrics is None:
            raise RequestError(
                "Metrics are disabled; start the server with --enable-metrics.", status_code=404
            )
        page, content_type = await metrics.scrape(request.headers.get("accept", ""))
        return Response(page, headers={"content-type": content_type})
