"""Implements ``/v1/models``, which lists the models that are served, in OpenAI's or Anthropic's
form: both APIs have this path."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from setpoint.core.excerpt import quoted
from setpoint.frontend.anthropic_models import (
    is_anthropics,
    model_card,
    model_page,
    no_such_model,
)
from setpoint.frontend.apis.openai.bodies.openai_bodies import DEFAULT_MODEL
from setpoint.frontend.apis.openai.openai_errors import error_body
from setpoint.frontend.arrival import note_refusal
from setpoint.frontend.http.api_routes import Routes
from setpoint.frontend.http.error_responses import json_response
from setpoint.frontend.refusal import Refusal
from setpoint.frontend.service import Service

MODELS_ROUTE = "/v1/models"


class ModelRoutes:
    def __init__(self, models: Sequence[Service]) -> None:
        """models: all models of the server, in their order."""
        self._models = models
        self._started_at = int(time.time())

    def install(self, routes: Routes) -> None:
        routes.add(MODELS_ROUTE, self.models, "GET", "HEAD")
        routes.add(MODELS_ROUTE + "/{model_id:path}", self.model, "GET", "HEAD")

    async def models(self, request: Request) -> Response:
        if is_anthropics(request.headers):
            return json_response(
                model_page([each.config for each in self._models], self._started_at)
            )
        cards = [self._card(each) for each in self._models]
        return json_response({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        model_id = request.path_params["model_id"]
        for_anthropic = is_anthropics(request.headers)
        for each in self._models:
            if model_id in (each.config.served_model_name, DEFAULT_MODEL):
                if for_anthropic:
                    return json_response(model_card(each.config, self._started_at))
                return json_response(self._card(each))
        names = ", ".join(each.config.served_model_name for each in self._models)
        are = "is" if len(self._models) == 1 else "are"
        refusal = Refusal(
            message=f"The model {quoted(model_id, 64)} does not exist; there {are} {names}.",
            status_code=404,
            param="model",
            code="model_not_found",
        )
        shape = no_such_model if for_anthropic else error_body
        note_refusal(request.scope, refusal.message)
        return json_response(shape(refusal), status_code=refusal.status_code)

    def _card(self, service: Service) -> dict[str, Any]:
        name = service.config.served_model_name
        card = {
            "id": name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "setpoint",
            "root": name,
            "parent": None,
            "max_model_len": service.config.max_model_len,
        }
        return card | {"state": service.residence.state} if service.residence.is_shared else card
