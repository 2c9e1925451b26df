"""Implements ``/v1/batches``: creates, lists, returns and cancels batches.
``setpoint.batch.worker`` runs them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from setpoint.core.errors import RequestError
from setpoint.core.excerpt import quoted
from setpoint.frontend.apis.openai.kept.fields import (
    check_metadata,
    expiry_seconds,
    page,
    window_seconds,
)
from setpoint.frontend.bodies import BodyParser
from setpoint.frontend.http.api_routes import Routes
from setpoint.frontend.http.body_reader import BodyReader
from setpoint.frontend.http.error_responses import json_response
from setpoint.frontend.http.queries import read_query
from setpoint.frontend.storage.batches import ENDED, Batch
from setpoint.frontend.storage.storage import Storage, require_storage

ROUTE = "/v1/batches"
_MOST = 100


class BatchBody(msgspec.Struct, kw_only=True):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: dict[str, Any] | None = None


@dataclass(slots=True, frozen=True)
class BatchesQuery:
    after: str | None = None
    limit: int = 20


class BatchRoutes:
    def __init__(
        self,
        storage: Storage | None,
        parser: BodyParser,
        bodies: BodyReader,
        endpoints: Collection[str],
    ) -> None:
        """endpoints: the routes that a batch may name."""
        self._parser = parser
        self._bodies = bodies
        self._endpoints = endpoints
        self._storage = storage

    def install(self, routes: Routes) -> None:
        one = ROUTE + "/{batch_id}"
        routes.add(ROUTE, self.create, "POST", body=BatchBody)
        routes.add(ROUTE, self.batches, "GET", "HEAD", query=BatchesQuery)
        routes.add(one, self.batch, "GET", "HEAD")
        routes.add(one + "/cancel", self.cancel, "POST")

    async def create(self, request: Request) -> Response:
        book = require_storage(self._storage).batches
        body, warnings = await self._bodies.read(request, self._read)
        if body.endpoint not in self._endpoints:
            known = ", ".join(self._endpoints)
            raise RequestError(f"endpoint must be one of {known}; got {quoted(body.endpoint, 64)}.")
        check_metadata(body.metadata)
        batch = await book.create(
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            window_s=window_seconds(body.completion_window),
            metadata=body.metadata,
            output_expires_after_s=expiry_seconds(
                body.output_expires_after, "output_expires_after"
            ),
        )
        return json_response(_batch_object(batch) | ({"warnings": warnings} if warnings else {}))

    async def batches(self, request: Request) -> Response:
        query = read_query(request, BatchesQuery)
        batches = require_storage(self._storage).batches.listing()
        return json_response(
            page(batches, _batch_object, after=query.after, limit=query.limit, most=_MOST)
        )

    async def batch(self, request: Request) -> Response:
        book = require_storage(self._storage).batches
        return json_response(_batch_object(book.get(request.path_params["batch_id"])))

    async def cancel(self, request: Request) -> Response:
        book = require_storage(self._storage).batches
        return json_response(_batch_object(await book.cancel(request.path_params["batch_id"])))

    async def _read(self, raw: dict[str, Any]) -> tuple[BatchBody, list[str]]:
        return self._parser.read(raw, BatchBody, route=ROUTE)


def _batch_object(batch: Batch) -> dict[str, Any]:
    has_ended = batch.status in ENDED
    faults = [
        {"code": each.code, "message": each.message, "line": each.line, "param": each.param}
        for each in batch.errors
    ]
    times = (
        "in_progress",
        "finalizing",
        "completed",
        "failed",
        "expired",
        "cancelling",
        "cancelled",
    )
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": faults} if faults else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id if has_ended else None,
        "error_file_id": batch.error_file_id if has_ended else None,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        **{f"{status}_at": batch.times.get(status) for status in times},
        "request_counts": {
            "total": batch.num_requests,
            "completed": batch.num_answered,
            "failed": batch.num_failed,
        },
        "metadata": batch.metadata,
    }
