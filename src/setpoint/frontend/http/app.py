"""The ASGI application: routes, CORS, who may ask, error shapes. Built from parts, so tests run it
without sockets or engine."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from setpoint.frontend.apis.openai.routes import OpenAIRoutes
from setpoint.frontend.apis.sglang.admin import AdminRoutes
from setpoint.frontend.apis.sglang.routes import NativeRoutes
from setpoint.frontend.http.auth import ApiKeyMiddleware
from setpoint.frontend.http.bodies import BodyReader
from setpoint.frontend.http.browsers import LocalOnlyMiddleware
from setpoint.frontend.http.errors import add_error_handlers
from setpoint.frontend.http.openapi import describe_bodies
from setpoint.frontend.service import Service


def create_app(service: Service, *, local_only: bool = False) -> FastAPI:
    """``local_only``: nobody but this machine can reach the port, and nobody but this machine is
    meant to."""
    app = FastAPI(title="Setpoint")
    app.state.service = service
    bodies = BodyReader(service.config.max_body_bytes)
    for routes in (NativeRoutes, AdminRoutes, OpenAIRoutes):
        routes(service, bodies).install(app)
    describe_bodies(app)
    add_error_handlers(app)
    if service.config.api_key is not None:
        app.add_middleware(ApiKeyMiddleware, api_key=service.config.api_key)
    # Added after it, so around it: a page can read a 401 too. Without the browser's credentials
    # (cookies): there are none to use.
    app.add_middleware(
        CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"]
    )
    if local_only and service.config.api_key is None:
        app.add_middleware(LocalOnlyMiddleware)
    return app
