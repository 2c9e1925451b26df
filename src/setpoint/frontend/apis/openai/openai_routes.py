"""The OpenAI routes that answer with a whole reply or in chunks: HTTP around
``frontend.apis.openai.route_table``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from setpoint.frontend.answering import Answering
from setpoint.frontend.apis.openai.openai_errors import stream_end
from setpoint.frontend.apis.openai.route_table import Api, chunk_apis
from setpoint.frontend.http.api_routes import Routes
from setpoint.frontend.http.body_reader import BodyReader
from setpoint.frontend.http.error_responses import json_response
from setpoint.frontend.http.sse import EventStream, cancelled_with_client, event


class OpenAIRoutes:
    def __init__(self, answering: Answering, bodies: BodyReader) -> None:
        self._bodies = bodies
        self._apis = chunk_apis(answering)

    def install(self, routes: Routes) -> None:
        for route, api in self._apis.items():
            routes.add(route, _handler(api, self._bodies), "POST", body=api.body)


def _handler(api: Api, bodies: BodyReader) -> Callable[[Request], Awaitable[Response]]:
    async def create(request: Request) -> Response:
        exchange = await bodies.read(request, api.open)
        if exchange.is_stream:
            return EventStream(exchange.job, _events(exchange.chunks()), stream_end)
        with exchange.job, cancelled_with_client(exchange.job, request.receive):
            outputs = await exchange.job.wait()
        return await bodies.answer(outputs, lambda: json_response(exchange.reply(outputs)))

    return create


async def _events(chunks: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(chunks):
        async for chunk in chunks:
            yield event(chunk)
