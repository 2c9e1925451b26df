"""The routes of the Responses API: HTTP around ``api``, and access to stored responses."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from setpoint.core.errors import RequestError
from setpoint.frontend.answering import Answering
from setpoint.frontend.apis.openai.kept.fields import page
from setpoint.frontend.apis.openai.responses.api import (
    COUNT_ROUTE,
    ROUTE,
    ResponseExchange,
    ResponsesApi,
)
from setpoint.frontend.apis.openai.responses.background import Background
from setpoint.frontend.apis.openai.responses.body import InputBody, ResponsesBody
from setpoint.frontend.arrival import IN_SCOPE
from setpoint.frontend.http.api_routes import Routes
from setpoint.frontend.http.body_reader import BodyReader
from setpoint.frontend.http.error_responses import json_response
from setpoint.frontend.http.queries import read_query
from setpoint.frontend.http.sse import (
    EventStream,
    FollowingStream,
    cancelled_with_client,
    named_event,
)
from setpoint.frontend.refusal import Refusal

_MOST_ITEMS = 100


@dataclass(slots=True, frozen=True)
class ResponseQuery:
    stream: bool = False
    starting_after: int | None = None


@dataclass(slots=True, frozen=True)
class ItemsQuery:
    after: str | None = None
    limit: int = 20
    order: str = "desc"


class ResponseRoutes:
    def __init__(self, answering: Answering, bodies: BodyReader) -> None:
        self._bodies = bodies
        self._api = ResponsesApi(answering)
        self._store = answering.responses
        self.background = Background(answering, self._api)

    def install(self, routes: Routes) -> None:
        one = ROUTE + "/{response_id}"
        routes.add(ROUTE, self.create, "POST", body=ResponsesBody)
        routes.add(COUNT_ROUTE, self.count, "POST", body=InputBody)
        routes.add(one, self.response, "GET", "HEAD", query=ResponseQuery)
        routes.add(one, self.delete, "DELETE")
        routes.add(one + "/cancel", self.cancel, "POST")
        routes.add(one + "/input_items", self.input_items, "GET", "HEAD", query=ItemsQuery)

    async def create(self, request: Request) -> Response:
        exchange = await self._bodies.read(request, self._api.open)
        if exchange.is_background:
            begun = await self.background.begin(exchange)
            request.scope[IN_SCOPE].is_in_background = True
            if exchange.is_stream:
                events = await self.background.follow(begun, after=-1, making=exchange.making)
                return FollowingStream(events)
            return json_response(exchange.making.head.begun("queued"))
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

    async def response(self, request: Request) -> Response:
        """A response in its current state or, with stream, its events with a sequence_number above
        starting_after."""
        query = read_query(request, ResponseQuery)
        response_id, starting_after = request.path_params["response_id"], query.starting_after
        kept = self._store.get(response_id)
        if not query.stream:
            if starting_after is not None:
                raise RequestError("starting_after needs stream=true.")
            return json_response(kept.response)
        if kept.background is None:
            raise RequestError(
                f"Response {response_id} was not created with background, so its stream cannot be"
                " repeated; get it without stream."
            )
        if starting_after is not None and starting_after < 0:
            raise RequestError(f"starting_after must be at least 0, got {starting_after}.")
        after = -1 if starting_after is None else starting_after
        return FollowingStream(await self.background.follow(kept.background, after=after))

    async def delete(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        kept = self._store.get(response_id)
        if kept.background is not None:
            await self.background.delete(kept.background)
        self._store.delete(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """Cancel a response in the background. A response that has ended is returned unchanged."""
        response_id = request.path_params["response_id"]
        kept = self._store.get(response_id)
        if not kept.response["background"]:
            raise RequestError(
                f"Response {response_id} does not run in the background; close its connection to"
                " end it."
            )
        if kept.background is not None:
            await self.background.cancel(kept.background)
        return json_response(self._store.get(response_id).response)

    async def input_items(self, request: Request) -> Response:
        query = read_query(request, ItemsQuery)
        kept = self._store.get(request.path_params["response_id"])
        items = [*kept.earlier, *kept.inputs]
        return json_response(
            page(
                items,
                dict,
                after=query.after,
                limit=query.limit,
                most=_MOST_ITEMS,
                order=query.order,
            )
        )


async def _encoded(exchange: ResponseExchange) -> AsyncGenerator[bytes, None]:
    async with aclosing(exchange.chunks()) as events:
        async for event in events:
            yield named_event(event["type"], event)
