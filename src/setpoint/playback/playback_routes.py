"""The routes of a server that shows one recording: the console's page and its data."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, HTTPException, Response
from starlette.middleware.trustedhost import TrustedHostMiddleware

from setpoint.frontend.console.static_pages import PAGE, Pages
from setpoint.playback.film import Film

HOSTS = ["127.0.0.1", "localhost"]
"""Accepted names of this host, so that the page of another site cannot read the recording by
resolving its own name to this address."""


def create_app(film: Film) -> FastAPI:
    app = FastAPI(title="Setpoint", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=HOSTS)
    router = APIRouter()
    whole = msgspec.json.encode(film.recording())

    @router.get(f"{PAGE}/recording")
    def recording() -> Response:
        return Response(whole, media_type="application/json")

    @router.get(f"{PAGE}/recording/at")
    def at(time: float) -> Response:
        if not math.isfinite(time):
            raise HTTPException(400, "time must be a number of seconds since 1970")
        return _json(film.at(time))

    Pages(source="recording").install(router)
    app.include_router(router)
    return app


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
