"""Anthropic's API as a dialect: HTTP around ``messages``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from setpoint.frontend.apis.anthropic.anthropic_errors import error_body, stream_end
from setpoint.frontend.apis.anthropic.messages_api import (
    COUNT_ROUTE,
    MESSAGES_ROUTE,
    MessageExchange,
    MessagesApi,
)
from setpoint.frontend.apis.anthropic.messages_body import ConversationBody, MessagesBody
from setpoint.frontend.http.api_routes import Routes
from setpoint.frontend.http.body_reader import BodyReader
from setpoint.frontend.http.dialect import Dialect
from setpoint.frontend.http.error_responses import json_response
from setpoint.frontend.http.sse import EventStream, cancelled_with_client, named_event
from setpoint.frontend.intake import new_rid
from setpoint.frontend.refusal import Refusal
from setpoint.frontend.service import Service

_REQUEST_ID = "request-id"
"""The header from which Anthropic's clients take the id that they show with an error."""


class AnthropicDialect(Dialect):
    prefix = MESSAGES_ROUTE
    hint = f"Messages go to {MESSAGES_ROUTE}; /docs lists every route."
    key_header = "x-api-key"

    def __init__(self, service: Service, models: Sequence[Service], bodies: BodyReader) -> None:
        self._bodies = bodies
        self._api = MessagesApi(service.answering)
        self.routes = Routes("anthropic")
        self.routes.add(MESSAGES_ROUTE, self.create, "POST", body=MessagesBody)
        self.routes.add(COUNT_ROUTE, self.count, "POST", body=ConversationBody)

    def error_body(self, refusal: Refusal) -> dict[str, Any]:
        return error_body(refusal)

    def error_headers(self, scope: Mapping[str, Any]) -> Mapping[str, str]:
        return {_REQUEST_ID: scope.get("state", {}).get("rid") or f"req_{new_rid()}"}

    def stream_end(self, refusal: Refusal | None) -> bytes:
        return stream_end(refusal)

    async def create(self, request: Request) -> Response:
        exchange = await self._bodies.read(request, self._api.open)
        request.state.rid = exchange.rid  # an error's answer needs it as well
        response = await self._respond(request, exchange)
        response.headers[_REQUEST_ID] = exchange.rid
        return response

    async def count(self, request: Request) -> Response:
        response = json_response(await self._bodies.read(request, self._api.count))
        response.headers[_REQUEST_ID] = f"req_{new_rid()}"
        return response

    async def _respond(self, request: Request, exchange: MessageExchange) -> Response:
        if exchange.is_stream:
            return EventStream(exchange.job, _encoded(exchange), stream_end)
        with exchange.job, cancelled_with_client(exchange.job, request.receive):
            outputs = await exchange.job.wait()
        return json_response(exchange.reply(outputs))


async def _encoded(exchange: MessageExchange) -> AsyncGenerator[bytes, None]:
    async with aclosing(exchange.events()) as groups:
        async for events in groups:
            yield b"".join(named_event(event["type"], event) for event in events)
