"""Implements ``/v1/models``, which lists the one model that is served."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Response

from setpoint.frontend.apis.openai.bodies.openai_bodies import DEFAULT_MODEL
from setpoint.frontend.apis.openai.openai_errors import error_body
from setpoint.frontend.config import FrontendConfig
from setpoint.frontend.http.error_responses import json_response
from setpoint.frontend.http.openapi import add_route
from setpoint.frontend.refusal import Refusal

MODELS_ROUTE = "/v1/models"


class ModelRoutes:
    def __init__(self, config: FrontendConfig) -> None:
        self._config = config
        self._started_at = int(time.time())

    def install(self, router: APIRouter) -> None:
        add_route(router, MODELS_ROUTE, self.models, "GET", "HEAD")
        add_route(router, MODELS_ROUTE + "/{model_id:path}", self.model, "GET", "HEAD")

    async def models(self) -> Response:
        return json_response({"object": "list", "data": [self._model_card()]})

    async def model(self, model_id: str) -> Response:
        if model_id in (self._config.served_model_name, DEFAULT_MODEL):
            return json_response(self._model_card())
        refusal = Refusal(
            message=f"The model {model_id!r} does not exist.",
            status_code=404,
            param="model",
            code="model_not_found",
        )
        return json_response(error_body(refusal), status_code=refusal.status_code)

    def _model_card(self) -> dict[str, Any]:
        name = self._config.served_model_name
        return {
            "id": name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "setpoint",
            "root": name,
            "parent": None,
            "max_model_len": self._config.context_len,
        }
