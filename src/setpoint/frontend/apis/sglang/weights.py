"""Routes that release the engine's memory and change its weights (docs/controls.md)."""

from __future__ import annotations

import asyncio
import logging

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from setpoint.core.errors import RequestError, err_type_of
from setpoint.core.operations import MemoryPart
from setpoint.frontend.apis.sglang.controls import ControlBodies
from setpoint.frontend.arrival import note_refusal
from setpoint.frontend.drain import without_weights
from setpoint.frontend.http.api_routes import Routes
from setpoint.frontend.http.error_responses import json_response
from setpoint.frontend.intake import check_key
from setpoint.frontend.service import Service

logger = logging.getLogger(__name__)

UPDATED = "Succeeded to update model weights."


class MemoryBody(msgspec.Struct):
    tags: list[MemoryPart] | None = None
    """The parts of memory; None: all parts that can be released, or that are released."""


class UpdateWeightsBody(msgspec.Struct):
    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    flush_cache: bool = True
    keep_pause: bool = False
    """Whether the engine stays paused if this request has paused it."""
    torch_empty_cache: bool = False
    """Has no effect, like the next key: memory that becomes free is always released."""
    recapture_cuda_graph: bool = False
    """Has no effect: captured steps are always made again."""


class WeightVersionBody(msgspec.Struct):
    new_version: str
    abort_all_requests: bool = True


class WeightRoutes:
    def __init__(self, service: Service, bodies: ControlBodies) -> None:
        self._service = service
        self._bodies = bodies
        self._engine = service.engine
        self._changing = asyncio.Lock()

    def install(self, parent: Routes) -> None:
        routes = parent.tagged("control")
        for path, handler, body in (
            ("/release_memory_occupation", self.release, MemoryBody),
            ("/resume_memory_occupation", self.restore, MemoryBody),
            ("/update_weights_from_disk", self.update, UpdateWeightsBody),
            ("/update_weight_version", self.update_version, WeightVersionBody),
        ):
            routes.add(path, handler, "POST", body=body)

    async def release(self, request: Request) -> Response:
        body, told = await self._bodies.read(request, MemoryBody)
        async with self._changing:
            parts = await self._parts(body, released=False)
            await self._engine.orders.release(parts)
        return json_response({"released": parts, **told})

    async def restore(self, request: Request) -> Response:
        body, told = await self._bodies.read(request, MemoryBody)
        async with self._changing:
            parts = await self._parts(body, released=True)
            try:
                await self._engine.orders.restore(parts)
            except RequestError:
                if self._engine.orders.why_no_weights:  # what waits would wait for ever
                    why = without_weights(self._engine)
                    logger.error("%s Requests are refused until they can be resumed.", why)
                    self._engine.abort(abort_all=True, message=why, err_type=err_type_of(503))
                raise
        return json_response({"resumed": parts, **told})

    async def update(self, request: Request) -> Response:
        """Load other weights. A refusal has the same format as the answer, because SGLang's clients
        expect that."""
        body, told = await self._bodies.read(request, UpdateWeightsBody)
        check_key(body.weight_version, "weight_version")
        async with self._changing:
            states = await self._engine.on_all(lambda line: line.get_state())
            num_paused = sum(state.num_paused_reqs for state in states)
            try:
                # In a thread, because it reads files.
                found = await asyncio.to_thread(
                    self._service.checkpoints.find, body.model_path, body.load_format
                )
                done = await self._service.weights.load(
                    found,
                    model_path=body.model_path,
                    version=body.weight_version,
                    flush_cache=body.flush_cache,
                    aborts=body.abort_all_requests,
                    keep_pause=body.keep_pause,
                )
            except RequestError as error:
                answer = {"success": False, "message": error.message}
                note_refusal(request.scope, error.message)
                status_code = error.status_code
            else:
                num_paused, status_code = sum(each.num_paused_reqs for each in done), 200
                answer = {"success": True, "message": UPDATED}
        counted = {**answer, "num_paused_requests": num_paused, **told}
        return json_response(counted, status_code=status_code)

    async def update_version(self, request: Request) -> Response:
        body, told = await self._bodies.read(request, WeightVersionBody)
        check_key(body.new_version, "new_version")
        if body.abort_all_requests:
            self._engine.abort(abort_all=True)
        self._service.weights.tell(None, body.new_version)
        message = f"The weight version is now {body.new_version}."
        answer = {"success": True, "message": message, "new_version": body.new_version}
        return json_response({**answer, **told})

    async def _parts(self, body: MemoryBody, *, released: bool) -> list[MemoryPart]:
        """The parts of memory that the body names, each once."""
        if body.tags is not None:
            if not body.tags:
                raise RequestError(f"tags must not be empty; it may name {', '.join(MemoryPart)}.")
            return list(dict.fromkeys(body.tags))
        now = (await self._engine.choose().get_state()).released
        parts = [part for part in MemoryPart if (part in now) == released]
        if not parts:
            raise RequestError(
                f"{'No memory is released' if released else 'All memory is already released'}."
            )
        return parts
