"""SGLang's API as a dialect: its routes have no common prefix, and it answers for every path that
no other dialect claims."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from setpoint.frontend.apis.openai.dialect import OpenAIDialect
from setpoint.frontend.apis.openai.errors import error_body, stream_end
from setpoint.frontend.apis.sglang.admin import FLUSH_ROUTE, AdminRoutes
from setpoint.frontend.apis.sglang.controls import ControlRoutes
from setpoint.frontend.apis.sglang.loads import LoadRoutes
from setpoint.frontend.apis.sglang.metrics import METRICS_ROUTE, MetricsRoutes
from setpoint.frontend.apis.sglang.routes import NativeRoutes
from setpoint.frontend.http.bodies import BodyReader
from setpoint.frontend.http.dialect import Dialect
from setpoint.frontend.refusal import Refusal
from setpoint.frontend.service import Service


class SGLangDialect(Dialect):
    prefix = ""
    hint = OpenAIDialect.hint
    public = ("/health", "/ready", METRICS_ROUTE)
    changed_by_get = (FLUSH_ROUTE,)

    def __init__(self, service: Service, bodies: BodyReader) -> None:
        self.router = APIRouter()
        NativeRoutes(service, bodies).install(self.router)
        AdminRoutes(service, bodies).install(self.router)
        ControlRoutes(service, bodies).install(self.router)
        LoadRoutes(service).install(self.router)
        MetricsRoutes(service).install(self.router)

    def error_body(self, refusal: Refusal) -> dict[str, Any]:
        return error_body(refusal)

    def stream_end(self, refusal: Refusal | None) -> bytes:
        return stream_end(refusal)
