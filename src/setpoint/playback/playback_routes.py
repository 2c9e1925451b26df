"""The routes of a server that shows one recording: the console's page and its data."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from setpoint.frontend.console.static_pages import PAGE, Pages
from setpoint.playback.film import Film

HOSTS = ["127.0.0.1", "localhost"]
"""Accepted names of this host, so that the page of another site cannot read the recording by
resolving its own name to this address."""


def create_app(film: Film) -> Starlette:
    whole = msgspec.json.encode(film.recording())

    def recording(request: Request) -> Response:
        return Response(whole, media_type="application/json")

    def at(request: Request) -> Response:
        try:
            time = float(request.query_params["time"])
        except (KeyError, ValueError):
            time = math.nan
        if not math.isfinite(time):
            raise HTTPException(400, "time must be a number of seconds since 1970")
        return _json(film.at(time))

    routes = [Route(f"{PAGE}/recording", recording), Route(f"{PAGE}/recording/at", at)]
    return Starlette(
        routes=[*routes, *Pages(source="recording").routes],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS)],
    )


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
