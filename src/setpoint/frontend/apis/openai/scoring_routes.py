"""The routes of scores and ranks: HTTP around ``scoring``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from setpoint.core.errors import RequestError
from setpoint.frontend.answering import Answering
from setpoint.frontend.apis.openai.scoring import (
    RERANK_ROUTE,
    SCORE_ROUTE,
    RerankBody,
    ScoreBody,
    ScoringApi,
    ScoringExchange,
)
from setpoint.frontend.http.api_routes import Routes
from setpoint.frontend.http.body_reader import BodyReader
from setpoint.frontend.http.error_responses import json_response
from setpoint.frontend.http.sse import cancelled_with_client


class ScoringRoutes:
    def __init__(self, answering: Answering, bodies: BodyReader) -> None:
        self._bodies = bodies
        self._api = ScoringApi(answering)

    def install(self, routes: Routes) -> None:
        score, rerank = self._handler(self._api.score), self._handler(self._api.rerank)
        routes.add(SCORE_ROUTE, score, "POST", body=ScoreBody)
        routes.add(RERANK_ROUTE, rerank, "POST", "PUT", body=RerankBody)
        for path in ("/v1/classify", "/classify"):
            routes.add(path, self.classify, "POST")

    async def classify(self, request: Request) -> Response:
        raise RequestError(
            "Classification needs a model with a classification head, which this server cannot load"
            f" yet; {SCORE_ROUTE} gives the probabilities of a generating model's answers."
        )

    def _handler(
        self, open_: Callable[[dict[str, Any]], Awaitable[ScoringExchange]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def create(request: Request) -> Response:
            exchange = await self._bodies.read(request, open_)
            with exchange.job, cancelled_with_client(exchange.job, request.receive):
                outputs = await exchange.job.wait()
            return await self._bodies.answer(
                outputs, lambda: json_response(exchange.reply(outputs))
            )

        return create
