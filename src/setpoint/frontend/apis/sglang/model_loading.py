"""Routes that load and unload one of several models (docs/several-models.md). SGLang has none; they
have the names and bodies of those of llama.cpp's server."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from setpoint.frontend.apis.sglang.controls import ControlBodies
from setpoint.frontend.http.api_routes import Routes
from setpoint.frontend.http.error_responses import json_response
from setpoint.frontend.residence import Residence

LOAD = "/models/load"
UNLOAD = "/models/unload"


class LoadingBody(msgspec.Struct):
    model: str
    """Its name; the request has come to the service of this model."""


class ModelLoadingRoutes:
    def __init__(self, residence: Residence, bodies: ControlBodies) -> None:
        self._residence = residence
        self._bodies = bodies

    def install(self, parent: Routes) -> None:
        routes = parent.tagged("control")
        routes.add(LOAD, self.load, "POST", body=LoadingBody)
        routes.add(UNLOAD, self.unload, "POST", body=LoadingBody)

    async def load(self, request: Request) -> Response:
        """Answers when the model is loaded."""
        _, told = await self._bodies.read(request, LoadingBody)
        await self._residence.load()
        return json_response({"success": True, **told})

    async def unload(self, request: Request) -> Response:
        """Answers at once; the model is unloaded when its open requests have ended."""
        _, told = await self._bodies.read(request, LoadingBody)
        self._residence.dismiss()
        return json_response({"success": True, **told})
