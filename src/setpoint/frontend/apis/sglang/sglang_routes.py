"""SGLang's own routes: ``/generate`` and ``/encode`` (docs/sglang/api.md)."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from setpoint.frontend.answering import Answering
from setpoint.frontend.apis.sglang.native import NativeApi, PreparedRequest
from setpoint.frontend.apis.sglang.repeated_chunks import RepeatedChunks, RepeatRate
from setpoint.frontend.apis.sglang.sglang_bodies import UNSUPPORTED, EncodeBody, GenerateBody
from setpoint.frontend.apis.sglang.sglang_errors import stream_end
from setpoint.frontend.http.api_routes import Routes
from setpoint.frontend.http.body_reader import BodyReader
from setpoint.frontend.http.error_responses import json_response
from setpoint.frontend.http.sse import EventStream, cancelled_with_client
from setpoint.frontend.jobs import Job


class NativeRoutes:
    def __init__(self, answering: Answering, bodies: BodyReader) -> None:
        self._answering = answering
        self._bodies = bodies
        self._config = answering.config
        self._api = NativeApi(answering)
        self._rate = RepeatRate()

    def install(self, parent: Routes) -> None:
        routes = parent.tagged("native")
        routes.add("/generate", self.generate, "POST", "PUT", body=GenerateBody)
        routes.add("/encode", self.encode, "POST", "PUT", body=EncodeBody)

    async def generate(self, request: Request) -> Response:
        body, prepared, job = await self._bodies.read(request, self._open_generate)
        if body.stream:
            chunks = RepeatedChunks(
                self._api,
                self._bodies,
                prepared,
                self._rate,
                incremental=self._config.incremental_streaming_output,
            )
            return EventStream(job, chunks.stream(job), stream_end)
        with job, cancelled_with_client(job, request.receive):
            outputs = await job.wait()

        def respond() -> Response:
            results = [self._api.result(output, prepared) for output in outputs]
            return json_response(results if prepared.is_list else results[0])

        return await self._bodies.answer(outputs, respond)

    async def encode(self, request: Request) -> Response:
        body, prepared, job = await self._bodies.read(request, self._open_encode)
        with job, cancelled_with_client(job, request.receive):
            outputs = await job.wait()
        results = [self._api.embedding(output, prepared, body.dimensions) for output in outputs]
        return json_response(results if prepared.is_list else results[0])

    async def _open_generate(
        self, raw: dict[str, Any]
    ) -> tuple[GenerateBody, PreparedRequest, Job]:
        body, warnings = self._answering.parser.read(
            raw, GenerateBody, route="/generate", unsupported=UNSUPPORTED
        )
        prepared = await self._api.prepare(body, warnings=warnings)
        return (
            body,
            prepared,
            self._answering.jobs.make(
                prepared.flat(), received=raw, no_logs=body.no_logs, turn=prepared.turn
            ),
        )

    async def _open_encode(self, raw: dict[str, Any]) -> tuple[EncodeBody, PreparedRequest, Job]:
        body, warnings = self._answering.parser.read(
            raw, EncodeBody, route="/encode", unsupported=UNSUPPORTED
        )
        prepared = await self._api.prepare_encode(body, warnings=warnings)
        return (
            body,
            prepared,
            self._answering.jobs.make(prepared.flat(), received=raw, no_logs=body.no_logs),
        )
