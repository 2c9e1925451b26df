"""OpenAI's API as a dialect, for every path below ``/v1`` that no other dialect claims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter

from setpoint.frontend.apis.openai.chat import ChatApi
from setpoint.frontend.apis.openai.kept.batch_routes import BatchRoutes
from setpoint.frontend.apis.openai.kept.file_routes import FileRoutes
from setpoint.frontend.apis.openai.model_list import ModelRoutes
from setpoint.frontend.apis.openai.openai_errors import error_body, stream_end
from setpoint.frontend.apis.openai.openai_routes import OpenAIRoutes
from setpoint.frontend.apis.openai.responses.response_routes import ResponseRoutes
from setpoint.frontend.apis.openai.route_table import openai_apis
from setpoint.frontend.apis.openai.scoring_routes import ScoringRoutes
from setpoint.frontend.http.body_reader import BodyReader
from setpoint.frontend.http.dialect import Dialect
from setpoint.frontend.refusal import Refusal
from setpoint.frontend.service import Service


class OpenAIDialect(Dialect):
    prefix = "/v1"
    hint = f"Chats go to {ChatApi.route}; /docs lists every route."

    def __init__(self, service: Service, models: Sequence[Service], bodies: BodyReader) -> None:
        self.router = APIRouter(tags=["openai"])
        OpenAIRoutes(service.answering, bodies).install(self.router)
        ModelRoutes(models).install(self.router)
        responses = ResponseRoutes(service.answering, bodies)
        responses.install(self.router)
        self.workers = (responses.background.run,)
        ScoringRoutes(service.answering, bodies).install(self.router)
        FileRoutes(service.storage).install(self.router)
        BatchRoutes(
            service.storage, service.answering.parser, bodies, openai_apis(service.answering)
        ).install(self.router)

    def error_body(self, refusal: Refusal) -> dict[str, Any]:
        return error_body(refusal)

    def stream_end(self, refusal: Refusal | None) -> bytes:
        return stream_end(refusal)
