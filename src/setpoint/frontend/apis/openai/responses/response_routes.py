"""The routes of the Responses API: HTTP around ``api``, and what is kept of earlier responses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Request, Response

from setpoint.core.errors import RequestError, SetpointError
from setpoint.frontend.apis.openai.kept.fields import page
from setpoint.frontend.apis.openai.responses.api import (
    COUNT_ROUTE,
    ROUTE,
    ResponseExchange,
    ResponsesApi,
)
from setpoint.frontend.apis.openai.responses.body import InputBody, ResponsesBody
from setpoint.frontend.http.body_reader import BodyReader
from setpoint.frontend.http.error_responses import json_response
from setpoint.frontend.http.openapi import add_route
from setpoint.frontend.http.sse import EventStream, cancelled_with_client, named_event
from setpoint.frontend.jobs import ClientGoneError
from setpoint.frontend.refusal import Refusal, refusal_of
from setpoint.frontend.service import Service

logger = logging.getLogger(__name__)

MAX_BACKGROUND = 1000
"""Most responses that run in the background at once."""
_MOST_ITEMS = 100


class ResponseRoutes:
    def __init__(self, service: Service, bodies: BodyReader) -> None:
        self._bodies = bodies
        self._api = ResponsesApi(service)
        self._store = service.responses
        self._background: set[asyncio.Task[None]] = set()

    def install(self, router: APIRouter) -> None:
        one = ROUTE + "/{response_id}"
        add_route(router, ROUTE, self.create, "POST", body=ResponsesBody)
        add_route(router, COUNT_ROUTE, self.count, "POST", body=InputBody)
        add_route(router, one, self.response, "GET", "HEAD")
        add_route(router, one, self.delete, "DELETE")
        add_route(router, one + "/cancel", self.cancel, "POST")
        add_route(router, one + "/input_items", self.input_items, "GET", "HEAD")

    async def create(self, request: Request) -> Response:
        exchange = await self._bodies.read(request, self._api.open)
        if exchange.is_background:
            return self._begin_in_background(exchange)
        if exchange.is_stream:

            def end(refusal: Refusal | None) -> bytes:
                if refusal is None:
                    return b""
                failure = exchange.failure(refusal)
                return named_event(failure["type"], failure)

            return EventStream(exchange.job, _encoded(exchange), end)
        with exchange.job, cancelled_with_client(exchange.job, request.receive):
            outputs = await exchange.job.wait()
        return json_response(exchange.reply(outputs))

    async def count(self, request: Request) -> Response:
        return json_response(await self._bodies.read(request, self._api.count))

    async def response(self, response_id: str, stream: bool = False) -> Response:
        if stream:
            raise RequestError("stream must be false: a stored response is returned whole.")
        return json_response(self._store.get(response_id).response)

    async def delete(self, response_id: str) -> Response:
        kept = self._store.delete(response_id)
        if kept.cancel is not None:
            kept.cancel()
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, response_id: str) -> Response:
        """Cancel a response in the background; one that has ended is returned as it is."""
        kept = self._store.get(response_id)
        if not kept.response["background"]:
            raise RequestError(
                f"Response {response_id} does not run in the background; its request ends when the"
                " connection."
            )
        if kept.cancel is not None:
            kept.cancel()
            await asyncio.gather(
                *(task for task in self._background if task.get_name() == response_id)
            )
        return json_response(self._store.get(response_id).response)

    async def input_items(
        self, response_id: str, after: str | None = None, limit: int = 20, order: str = "desc"
    ) -> Response:
        kept = self._store.get(response_id)
        items = [*kept.earlier, *kept.inputs]
        return json_response(
            page(items, dict, after=after, limit=limit, most=_MOST_ITEMS, order=order)
        )

    def _begin_in_background(self, exchange: ResponseExchange) -> Response:
        if len(self._background) >= MAX_BACKGROUND:
            raise RequestError(
                f"{MAX_BACKGROUND} responses already run in the background, the limit of this"
                " server"
                " takes.",
                status_code=429,
            )
        response = exchange.begin_in_background()
        task = asyncio.create_task(_work(exchange), name=response["id"])
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return json_response(response)


async def _work(exchange: ResponseExchange) -> None:
    try:
        with exchange.job:
            await exchange.run_in_background()
    except ClientGoneError:
        exchange.end_in_background(None)
    except SetpointError as error:
        exchange.end_in_background(refusal_of(error))
    except Exception:
        logger.exception("An internal error ended a response in the background.")
        message = "Internal server error; the server's log has the details."
        exchange.end_in_background(Refusal(message=message, status_code=500))


async def _encoded(exchange: ResponseExchange) -> AsyncGenerator[bytes, None]:
    async with aclosing(exchange.chunks()) as events:
        async for event in events:
            yield named_event(event["type"], event)
