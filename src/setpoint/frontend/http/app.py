"""The ASGI application: routes, CORS, API key, error shapes. Built from parts, so tests run it without sockets or engine."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from setpoint.frontend.http.admin import AdminRoutes
from setpoint.frontend.http.auth import ApiKeyMiddleware
from setpoint.frontend.http.errors import add_error_handlers
from setpoint.frontend.http.native import NativeRoutes
from setpoint.frontend.http.openai import OpenAIRoutes
from setpoint.frontend.service import Service


def create_app(service: Service) -> FastAPI:
    app = FastAPI(title="Setpoint")
    app.state.service = service
    for routes in (NativeRoutes, AdminRoutes, OpenAIRoutes):
        routes(service).install(app)
    add_error_handlers(app)
    if service.config.api_key is not None:
        app.add_middleware(ApiKeyMiddleware, api_key=service.config.api_key)
    # Added last, so it is outermost: a browser can read a 401 too.
    app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"], allow_credentials=True)
    return app
