"""Implements ``/configure_logging``, which changes the log of a running server, under SGLang's
names."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from setpoint.frontend.apis.sglang.controls import ControlBodies
from setpoint.frontend.http.api_routes import Routes
from setpoint.frontend.http.error_responses import json_response
from setpoint.frontend.live_settings import LiveSettings

LOGGING_ROUTE = "/configure_logging"

UNSUPPORTED = (
    "crash_dump_folder",
    "dump_requests_exclude_meta_keys",
    "dump_requests_folder",
    "dump_requests_threshold",
)


class LogSettingsBody(msgspec.Struct, kw_only=True):
    log_requests: bool | None = None
    log_requests_level: int | None = None
    log_requests_format: str | None = None
    log_level: str | None = None


class LogSettingsRoutes:
    def __init__(self, live: LiveSettings, bodies: ControlBodies) -> None:
        self._live = live
        self._bodies = bodies

    def install(self, parent: Routes) -> None:
        routes = parent.tagged("admin")
        routes.add(LOGGING_ROUTE, self.configure_logging, "POST", body=LogSettingsBody)

    async def configure_logging(self, request: Request) -> Response:
        body, told = await self._bodies.read(request, LogSettingsBody, unsupported=UNSUPPORTED)
        values = msgspec.to_builtins(body)
        given = {name: value for name, value in values.items() if value is not None}
        by = "an unknown client" if request.client is None else request.client.host
        change = await self._live.change(given, by=by, why=LOGGING_ROUTE)
        warnings = [*told.get("warnings", ()), *change.warnings]
        return json_response({"warnings": warnings}) if warnings else Response(status_code=200)
