"""SGLang's API as a dialect: its routes have no common prefix, and it answers for every path that
no other dialect claims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from setpoint.frontend.apis.openai.openai_dialect import OpenAIDialect
from setpoint.frontend.apis.sglang import fault_tolerance, model_loading, storage_routes
from setpoint.frontend.apis.sglang.admin import FLUSH_ROUTE, AdminRoutes
from setpoint.frontend.apis.sglang.controls import ControlBodies, ControlRoutes
from setpoint.frontend.apis.sglang.doctor_route import DoctorRoutes
from setpoint.frontend.apis.sglang.expert_records import PATHS, ExpertRecordRoutes
from setpoint.frontend.apis.sglang.loads import LoadRoutes
from setpoint.frontend.apis.sglang.log_settings import LOGGING_ROUTE, LogSettingsRoutes
from setpoint.frontend.apis.sglang.metrics_route import METRICS_ROUTE, MetricsRoutes
from setpoint.frontend.apis.sglang.missing import CONTROLS, install_missing
from setpoint.frontend.apis.sglang.parsing import ParsingRoutes
from setpoint.frontend.apis.sglang.profiles import FREEZE, START, STOP, ProfileRoutes
from setpoint.frontend.apis.sglang.session_routes import SessionRoutes
from setpoint.frontend.apis.sglang.sglang_errors import error_body, stream_end
from setpoint.frontend.apis.sglang.sglang_routes import NativeRoutes
from setpoint.frontend.apis.sglang.tokenization import TokenizationRoutes
from setpoint.frontend.apis.sglang.weights import WeightRoutes
from setpoint.frontend.http.api_routes import Routes
from setpoint.frontend.http.body_reader import BodyReader
from setpoint.frontend.http.dialect import Dialect
from setpoint.frontend.refusal import Refusal
from setpoint.frontend.service import Service


class SGLangDialect(Dialect):
    prefix = ""
    hint = OpenAIDialect.hint
    public = ("/health", "/ready", METRICS_ROUTE)
    changed_by_get = (FLUSH_ROUTE, START, STOP, *PATHS)
    admin = (
        FLUSH_ROUTE,
        "/abort_request",
        "/set_internal_state",
        START,
        STOP,
        FREEZE,
        *PATHS,
        LOGGING_ROUTE,
        "/pause_generation",
        "/continue_generation",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        model_loading.LOAD,
        model_loading.UNLOAD,
        "/update_weights_from_disk",
        "/update_weight_version",
        *fault_tolerance.PATHS,
        storage_routes.ROUTE,
        storage_routes.CLEAR,
        *CONTROLS,
    )

    def __init__(self, service: Service, models: Sequence[Service], bodies: BodyReader) -> None:
        self.routes = Routes()
        NativeRoutes(service.answering, bodies).install(self.routes)
        TokenizationRoutes(service.answering, bodies).install(self.routes)
        controls = ControlBodies(service.answering.parser, bodies)
        LogSettingsRoutes(service.live, controls).install(self.routes)
        AdminRoutes(service, models, bodies).install(self.routes)
        ControlRoutes(service, controls).install(self.routes)
        ParsingRoutes(service.config, controls).install(self.routes)
        ProfileRoutes(service, controls).install(self.routes)
        ExpertRecordRoutes(service).install(self.routes)
        WeightRoutes(service, controls).install(self.routes)
        model_loading.ModelLoadingRoutes(service.residence, controls).install(self.routes)
        fault_tolerance.FaultToleranceRoutes(service, controls).install(self.routes)
        storage_routes.StorageRoutes(service, controls).install(self.routes)
        SessionRoutes(service.answering.sessions, controls).install(self.routes)
        install_missing(self.routes)
        LoadRoutes(service.info).install(self.routes)
        MetricsRoutes(models).install(self.routes)
        DoctorRoutes(service.watch, service.info).install(self.routes)

    def error_body(self, refusal: Refusal) -> dict[str, Any]:
        return error_body(refusal)

    def stream_end(self, refusal: Refusal | None) -> bytes:
        return stream_end(refusal)
