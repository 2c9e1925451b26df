"""Routes about the storage of cached prefixes (docs/hierarchical-cache.md): what it is and does,
use one, use none, empty it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from setpoint.core.control import TierState
from setpoint.core.errors import RequestError
from setpoint.core.operations import AttachStorage, ClearStorage, DetachStorage
from setpoint.frontend.apis.sglang.controls import ControlBodies
from setpoint.frontend.http.api_routes import Routes
from setpoint.frontend.http.error_responses import json_response
from setpoint.frontend.service import Service

ROUTE = "/hicache/storage-backend"
CLEAR = f"{ROUTE}/clear"
CLEAR_S = 60.0
"""How long a client may wait for the end of a clearing."""
POLL_S = 0.02

UNSUPPORTED = ("hicache_storage_prefetch_policy", "hicache_write_policy")
"""Keys of SGLang's body that would change what was given at the start."""


class AttachBody(msgspec.Struct):
    hicache_storage_backend: str
    hicache_storage_backend_extra_config_json: str | None = None


class StorageRoutes:
    def __init__(self, service: Service, bodies: ControlBodies) -> None:
        self._service, self._engine, self._bodies = service, service.engine, bodies

    def install(self, parent: Routes) -> None:
        routes = parent.tagged("control")
        routes.add(ROUTE, self.status, "GET", "HEAD")
        routes.add(ROUTE, self.attach, "PUT", body=AttachBody)
        routes.add(ROUTE, self.detach, "DELETE")
        routes.add(CLEAR, self.clear, "POST")

    async def status(self, request: Request) -> Response:
        states = await self._engine.on_all(lambda line: line.get_state())
        tiers = [state.report.tiers for state in states]
        return json_response(
            {
                "hicache_storage_backend": next((each.backend for each in tiers if each), None),
                "engines": [_shown(each) for each in tiers],
            }
        )

    async def attach(self, request: Request) -> Response:
        self._check_key()
        body, warnings = await self._bodies.read(request, AttachBody, unsupported=UNSUPPORTED)
        settings = body.hicache_storage_backend_extra_config_json or ""
        await self._engine.orders.use_storage(AttachStorage(body.hicache_storage_backend, settings))
        return _done("HiCache storage backend attached.", warnings)

    async def detach(self, request: Request) -> Response:
        self._check_key()
        await self._engine.orders.use_storage(DetachStorage())
        return _done("HiCache storage backend detached.")

    async def clear(self, request: Request) -> Response:
        self._check_key()
        await self._engine.on_all(lambda line: line.operate(ClearStorage()))
        deadline = time.monotonic() + CLEAR_S
        found = await self._tiers()
        while any(tiers.num_clearings for tiers in found):
            if time.monotonic() > deadline:
                raise RequestError(
                    f"The storage is still being cleared after {CLEAR_S:g} s; GET {ROUTE} shows"
                    " num_clearings, which becomes 0, and clear_error.",
                    status_code=503,
                )
            await asyncio.sleep(POLL_S)
            found = await self._tiers()
        if errors := sorted({tiers.clear_error for tiers in found} - {""}):
            raise RequestError(
                f"The storage could not be cleared: {'; '.join(errors)}", status_code=503
            )
        return _done("HiCache storage cleared.")

    async def _tiers(self) -> list[TierState]:
        """The tiers of all engines that have any."""
        states = await self._engine.on_all(lambda line: line.get_state())
        return [state.report.tiers for state in states if state.report.tiers is not None]

    def _check_key(self) -> None:
        """Raise RequestError on a server without an admin key: a client could make it write to any
        folder."""
        if self._service.config.admin_api_key is None:
            raise RequestError(
                "The storage is changed only on servers that have an admin key (--admin-api-key)."
            )


def _shown(tiers: TierState | None) -> dict[str, Any] | None:
    return None if tiers is None else msgspec.structs.asdict(tiers)


def _done(message: str, warnings: dict[str, Any] | None = None) -> Response:
    return json_response({"success": True, "message": message, **(warnings or {})})
