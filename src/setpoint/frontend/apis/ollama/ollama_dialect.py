"""Ollama's API as a dialect: HTTP around the routes beside it. It answers for every path below
``/api``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from setpoint.core.errors import RequestError
from setpoint.frontend.apis.ollama.embed import (
    EMBED_ROUTE,
    EMBEDDINGS_ROUTE,
    EmbedApi,
    EmbedExchange,
)
from setpoint.frontend.apis.ollama.model_tags import ModelApi
from setpoint.frontend.apis.ollama.ollama_bodies import (
    EmbedBody,
    EmbeddingsBody,
    OllamaChatBody,
    OllamaGenerateBody,
    PullBody,
    ShowBody,
)
from setpoint.frontend.apis.ollama.text import (
    CHAT_ROUTE,
    GENERATE_ROUTE,
    LoadReply,
    OllamaExchange,
    TextApi,
)
from setpoint.frontend.http.api_routes import Routes
from setpoint.frontend.http.body_reader import BodyReader
from setpoint.frontend.http.dialect import Dialect
from setpoint.frontend.http.error_responses import json_response
from setpoint.frontend.http.sse import EventStream, cancelled_with_client, one_line
from setpoint.frontend.refusal import Refusal
from setpoint.frontend.service import Service

LINES = "application/x-ndjson"
"""The content type of a stream with one JSON object on each line."""

_REFUSED = {
    "/api/push": ("POST",),
    "/api/create": ("POST",),
    "/api/copy": ("POST",),
    "/api/delete": ("DELETE",),
    "/api/blobs/{digest}": ("HEAD", "POST"),
}
"""Routes that change the set of models on a server."""


class OllamaDialect(Dialect):
    prefix = "/api"
    hint = f"Chats go to {CHAT_ROUTE}; /docs lists every route."

    def __init__(self, service: Service, models: Sequence[Service], bodies: BodyReader) -> None:
        self._bodies = bodies
        self._models = ModelApi(service, models)
        self._residence = service.residence
        text = TextApi(service.answering, service.residence)
        embed = EmbedApi(service.answering)
        self.routes = routes = Routes("ollama")
        routes.add(CHAT_ROUTE, self._texts(text.chat), "POST", body=OllamaChatBody)
        routes.add(GENERATE_ROUTE, self._texts(text.generate), "POST", body=OllamaGenerateBody)
        vectors = self._vectors(embed.open, EmbedExchange.reply)
        routes.add(EMBED_ROUTE, vectors, "POST", body=EmbedBody)
        vectors = self._vectors(embed.open_one, EmbedExchange.reply_one)
        routes.add(EMBEDDINGS_ROUTE, vectors, "POST", body=EmbeddingsBody)
        routes.add("/api/show", self.show, "POST", body=ShowBody)
        routes.add("/api/pull", self.pull, "POST", body=PullBody)
        routes.add("/api/tags", self.tags, "GET", "HEAD")
        routes.add("/api/ps", self.running, "GET", "HEAD")
        routes.add("/api/version", self.version, "GET", "HEAD")
        for path, methods in _REFUSED.items():
            routes.add(path, self.refuse, *methods)

    def error_body(self, refusal: Refusal) -> dict[str, Any]:
        return {"error": refusal.message}

    def stream_end(self, refusal: Refusal | None) -> bytes:
        return b"" if refusal is None else _line(self.error_body(refusal))

    async def show(self, request: Request) -> Response:
        return json_response(await self._bodies.read(request, self._models.show))

    async def pull(self, request: Request) -> Response:
        statuses, is_stream = await self._bodies.read(request, self._models.pull)
        if is_stream:
            return Response(b"".join(map(_line, statuses)), media_type=LINES)
        return json_response(statuses[-1])

    async def tags(self, request: Request) -> Response:
        return json_response(self._models.tags())

    async def running(self, request: Request) -> Response:
        return json_response(await self._models.running())

    async def version(self, request: Request) -> Response:
        return json_response(self._models.version())

    async def refuse(self, request: Request) -> Response:
        raise RequestError(
            "This server serves only what it was started with; it does not create,"
            " copy, upload or delete models."
        )

    def _texts(
        self, open_: Callable[[dict[str, Any]], Awaitable[OllamaExchange | LoadReply]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def create(request: Request) -> Response:
            exchange = await self._bodies.read(request, open_)
            if isinstance(exchange, LoadReply):
                await exchange.carry_out()
                media_type = LINES if exchange.is_stream else "application/json"
                return Response(_line(exchange.content), media_type=media_type)
            if exchange.is_stream:
                lines = self._lines(exchange)
                return EventStream(exchange.job, lines, self.stream_end, media_type=LINES)
            with exchange.job, cancelled_with_client(exchange.job, request.receive):
                self._residence.keep(exchange.keep_s)
                outputs = await exchange.job.wait()
            return await self._bodies.answer(
                outputs, lambda: json_response(exchange.reply(outputs[0]))
            )

        return create

    def _vectors(
        self,
        open_: Callable[[dict[str, Any]], Awaitable[EmbedExchange]],
        reply: Callable[[EmbedExchange, Any], dict[str, Any]],
    ) -> Callable[[Request], Awaitable[Response]]:
        async def create(request: Request) -> Response:
            exchange = await self._bodies.read(request, open_)
            with exchange.job, cancelled_with_client(exchange.job, request.receive):
                self._residence.keep(exchange.keep_s)
                outputs = await exchange.job.wait()
            return json_response(reply(exchange, outputs))

        return create

    async def _lines(self, exchange: OllamaExchange) -> AsyncGenerator[bytes, None]:
        self._residence.keep(exchange.keep_s)
        async with aclosing(exchange.objects()) as objects:
            async for each in objects:
                yield _line(each)


def _line(content: Any) -> bytes:
    return one_line(content) + b"\n"
