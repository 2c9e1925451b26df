"""OpenAI's API as a dialect, for every path below ``/v1`` that no other dialect claims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from setpoint.frontend.apis.openai.chat import ChatApi
from setpoint.frontend.apis.openai.kept.batch_routes import BatchRoutes
from setpoint.frontend.apis.openai.kept.file_routes import FileRoutes
from setpoint.frontend.apis.openai.model_list import ModelRoutes
from setpoint.frontend.apis.openai.openai_errors import error_body, stream_end
from setpoint.frontend.apis.openai.openai_routes import OpenAIRoutes
from setpoint.frontend.apis.openai.responses.response_routes import ResponseRoutes
from setpoint.frontend.apis.openai.route_table import openai_apis
from setpoint.frontend.apis.openai.scoring_routes import ScoringRoutes
from setpoint.frontend.http.api_routes import Routes
from setpoint.frontend.http.body_reader import BodyReader
from setpoint.frontend.http.dialect import Dialect
from setpoint.frontend.refusal import Refusal
from setpoint.frontend.service import Service


class OpenAIDialect(Dialect):
    prefix = "/v1"
    hint = f"Chats go to {ChatApi.route}; /docs lists every route."

    def __init__(self, service: Service, models: Sequence[Service], bodies: BodyReader) -> None:
        self.routes = Routes("openai")
        OpenAIRoutes(service.answering, bodies).install(self.routes)
        ModelRoutes(models).install(self.routes)
        responses = ResponseRoutes(service.answering, bodies)
        responses.install(self.routes)
        self.workers = (responses.background.run,)
        ScoringRoutes(service.answering, bodies).install(self.routes)
        FileRoutes(service.storage).install(self.routes)
        BatchRoutes(
            service.storage, service.answering.parser, bodies, openai_apis(service.answering)
        ).install(self.routes)

    def error_body(self, refusal: Refusal) -> dict[str, Any]:
        return error_body(refusal)

    def stream_end(self, refusal: Refusal | None) -> bytes:
        return stream_end(refusal)
