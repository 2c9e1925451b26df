"""The ASGI application: routes, CORS, access control, error shapes. It is built from parts, so
tests can run it without sockets or an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from setpoint.frontend.http import api_docs
from setpoint.frontend.http.access import AccessLogMiddleware
from setpoint.frontend.http.auth import ApiKeyMiddleware
from setpoint.frontend.http.body_reader import BodyReader
from setpoint.frontend.http.browsers import LocalOnlyMiddleware
from setpoint.frontend.http.content_encoding import ContentEncodingMiddleware
from setpoint.frontend.http.dialect import Dialect, Dialects
from setpoint.frontend.http.error_responses import ErrorHandlers
from setpoint.frontend.http.metered import MeteredMiddleware
from setpoint.frontend.http.model_choice import ModelChoice
from setpoint.frontend.http.openapi import document_route
from setpoint.frontend.http.routes import led_to_slashes
from setpoint.frontend.service import Service

MakeDialect = Callable[[Service, Sequence[Service], BodyReader], Dialect]
"""Makes a dialect of one model. It also gets all models of the server, in their order."""


def create_app(
    service: Service,
    makers: Sequence[MakeDialect],
    *,
    others: Sequence[Service] = (),
    local_only: bool = False,
) -> Starlette:
    """The application. makers: make the dialects that it speaks. others: the server's models behind
    the first one. local_only: whether only this machine can, and should, reach the port."""
    models = (service, *others)
    app = _bare_app(service, models, makers)
    dialects: Dialects = app.state.dialects
    if others:
        behind = {each.config.served_model_name: _bare_app(each, models, makers) for each in others}
        app.state.workers += [work for each in behind.values() for work in each.state.workers]
        app.add_middleware(
            ModelChoice,
            first=service.config.served_model_name,
            others=behind,
            max_body_bytes=max(each.config.max_body_bytes for each in models),
            dialects=dialects,
        )
    app.add_middleware(ContentEncodingMiddleware, dialects=dialects)
    api_keys, admin_api_key = service.config.api_keys, service.config.admin_api_key
    if api_keys or admin_api_key is not None:
        app.add_middleware(
            ApiKeyMiddleware, api_keys=api_keys, admin_api_key=admin_api_key, dialects=dialects
        )
    # Added after the API key's middleware and so around it: a page can also read a 401. Without the
    # browser's credentials (cookies), because the server uses none.
    app.add_middleware(
        CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"]
    )
    if local_only and not api_keys:
        app.add_middleware(LocalOnlyMiddleware, dialects=dialects)
    if service.metrics is not None:
        app.add_middleware(MeteredMiddleware, metrics=service.metrics.http)
    app.add_middleware(AccessLogMiddleware)
    return app


def _bare_app(
    service: Service, models: Sequence[Service], makers: Sequence[MakeDialect]
) -> Starlette:
    """The routes of one model."""
    bodies = BodyReader(service.config.max_body_bytes)
    dialects = Dialects(
        [make(service, models, bodies) for make in makers],
        on_refusal=lambda refusal: service.events.book.count_refusal(refusal.status_code),
    )
    routes = [route for dialect in dialects.all for route in dialect.routes.all]
    app = Starlette(
        routes=[
            document_route(routes),
            Route("/docs", api_docs.swagger),
            Route("/redoc", api_docs.redoc),
            *routes,
        ]
    )
    app.router.redirect_slashes = False  # Starlette's would lead to the host that the client names
    app.router.default = led_to_slashes(app.router)
    app.state.dialects = dialects
    app.state.drain = service.drain
    app.state.unread = service.unread
    app.state.workers = [work for dialect in dialects.all for work in dialect.workers]
    ErrorHandlers(dialects).install(app)
    return app
