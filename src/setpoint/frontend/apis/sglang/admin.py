"""Liveness, information and control routes (docs/sglang/api.md#liveness-and-control)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from setpoint.core.control import PAUSE_FIRST
from setpoint.frontend.arrival import note_refusal
from setpoint.frontend.drain import WORD, without_weights
from setpoint.frontend.http.api_routes import Routes
from setpoint.frontend.http.body_reader import BodyReader
from setpoint.frontend.http.error_responses import json_response
from setpoint.frontend.http.queries import read_query
from setpoint.frontend.intake import check_rid
from setpoint.frontend.service import Service

FLUSH_ROUTE = "/flush_cache"
_MAX_FLUSH_WAIT_S = 600.0
_FLUSH_POLL_S = 0.05


class AbortBody(msgspec.Struct):
    rid: str | None = ""
    abort_all: bool = False


class SettingsBody(msgspec.Struct):
    server_args: dict[str, Any]
    """Option -> its new value."""
    why: str = ""


@dataclass(slots=True, frozen=True)
class FlushQuery:
    timeout: float = 0.0
    """Seconds."""


class AdminRoutes:
    def __init__(self, service: Service, models: Sequence[Service], bodies: BodyReader) -> None:
        """models: all models of the server."""
        self._service = service
        self._models = models
        self._bodies = bodies
        self._config = service.config
        self._engine = service.engine
        self._flushing = False

    def install(self, parent: Routes) -> None:
        routes = parent.tagged("admin")
        reads: dict[str, Callable[..., Any]] = {
            "/": self.root,
            "/health": self.health,
            "/health_generate": self.health_generate,
            "/ready": self.ready,
            "/ping": self.ready,
            "/model_info": self.model_info,
            "/get_model_info": self.model_info,
            "/server_info": self.server_info,
            "/get_server_info": self.server_info,
        }
        for path, handler in reads.items():
            routes.add(path, handler, "GET", "HEAD")
        routes.add(FLUSH_ROUTE, self.flush_cache, "GET", "POST", query=FlushQuery)
        routes.add("/abort_request", self.abort_request, "POST", body=AbortBody)
        routes.add(
            "/set_internal_state",
            self.set_internal_state,
            "POST",
            "PUT",
            body=SettingsBody,
        )

    async def root(self, request: Request) -> Response:
        names = ", ".join(each.config.served_model_name for each in self._models)
        return PlainTextResponse(f"Setpoint serves {names}.\n")

    async def health(self, request: Request) -> Response:
        if self._config.health_generates or self._service.drain.is_on:
            return await self.health_generate(request)
        return Response()

    async def health_generate(self, request: Request) -> Response:
        if self._service.drain.is_on:
            return _refused(request, WORD, status_code=503)
        healthy = await asyncio.gather(*(each.health.is_healthy() for each in self._models))
        if any(healthy):
            return self._probe_response(request, 200)
        return self._probe_response(request, 503, otherwise="The engine gives no sign of life.")

    async def ready(self, request: Request) -> Response:
        if self._service.drain.is_on:
            return _refused(request, WORD, status_code=503)
        if self._engine.orders.why_no_weights:
            return _refused(request, without_weights(self._engine), status_code=503)
        models = self._models
        is_ready = any(each.engine.is_ready for each in models)
        # Of several models, the others are there for their requests.
        misses = len(models) == 1 and any(each.is_missed for each in self._engine.standings())
        return self._probe_response(request, 200 if is_ready and not misses else 503)

    def _probe_response(
        self, request: Request, status_code: int, *, otherwise: str = ""
    ) -> Response:
        """The answer to a probe. Its body has a line for each engine that computes nothing.
        otherwise: the body if there is none."""
        found = [
            f"{of}{standing}"
            for each, of in self._named_models()
            for standing in each.engine.standings()
            if standing.state != "ready" or (standing.is_still and not each.residence.is_shared)
        ]
        lines = found or ([otherwise] if otherwise else [])
        if lines and status_code != 200:
            note_refusal(request.scope, "; ".join(lines))
        text = "".join(f"{line}\n" for line in lines)
        return PlainTextResponse(text, status_code=status_code)

    def _named_models(self) -> list[tuple[Service, str]]:
        """The models, each with the beginning of a line about it; of one alone, nothing is said."""
        models = self._models
        return [
            (each, f"{each.config.served_model_name}: " if len(models) > 1 else "")
            for each in models
        ]

    async def model_info(self, request: Request) -> Response:
        config = self._service.config
        info: dict[str, Any] = {
            "model_path": self._service.weights.model_path,
            "served_model_name": config.served_model_name,
            "tokenizer_path": config.tokenizer_path,
            "is_generation": config.pooling is None,
            "preferred_sampling_params": config.preferred_sampling or None,
            "weight_version": self._service.weights.version,
            "load_format": "auto",
            "reasoning_parser": _format_name(config.reasoning_parser),
            "tool_call_parser": _format_name(config.tool_call_parser),
            "disaggregation_mode": config.sharing.role,
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": None,
            "architectures": None,
        }
        return json_response({**info, **config.model_info})

    async def server_info(self, request: Request) -> Response:
        return json_response(await self._service.info.now())

    async def flush_cache(self, request: Request) -> Response:
        """Wait until the engines are idle, for at most ``timeout`` seconds, and ask them to flush
        their caches, which all do or none does."""
        timeout = read_query(request, FlushQuery).timeout
        if self._flushing:
            return _refused(request, "Another flush_cache is already in progress.")
        self._flushing = True
        try:
            deadline = time.monotonic() + min(timeout, _MAX_FLUSH_WAIT_S)
            while time.monotonic() < deadline and await self._busy():
                await asyncio.sleep(_FLUSH_POLL_S)
            while (
                not (is_flushed := await self._engine.orders.flush())
                and time.monotonic() < deadline
            ):
                await asyncio.sleep(_FLUSH_POLL_S)
        finally:
            self._flushing = False
        if is_flushed:
            return PlainTextResponse("Cache flushed.\n")
        return _refused(request, f"Cache not flushed: {self._why_not_flushed()}.")

    def _why_not_flushed(self) -> str:
        stopped = [str(line.rank) for line in self._engine.lines if line.life.is_suspended]
        if stopped:
            return f"a signal has stopped the process of engine {', '.join(stopped)}"
        return f"there are pending requests. {PAUSE_FIRST} ({FLUSH_ROUTE}?timeout=60)"

    async def _busy(self) -> bool:
        return any(
            state.is_busy for state in await self._engine.on_all(lambda line: line.get_state())
        )

    async def abort_request(self, request: Request) -> Response:
        body, warnings = await self._bodies.read(request, self._read_abort)
        if body.rid:
            check_rid(body.rid)
        self._engine.abort(body.rid or "", abort_all=body.abort_all)
        return json_response({"warnings": warnings}) if warnings else Response(status_code=200)

    async def _read_abort(self, raw: dict[str, Any]) -> tuple[AbortBody, list[str]]:
        return self._service.answering.parser.read(raw, AbortBody, route="/abort_request")

    async def set_internal_state(self, request: Request) -> Response:
        """Change live options. The answer is a list with one entry, because the change applies to
        all ranks; in SGLang the entry is true."""
        body, warnings = await self._bodies.read(request, self._read_settings)
        by = "an unknown client" if request.client is None else request.client.host
        change = await self._service.live.change(body.server_args, by=by, why=body.why)
        answer = {"updated": True, "changes": change.options}
        told = [*warnings, *change.warnings]
        return json_response([answer | ({"warnings": told} if told else {})])

    async def _read_settings(self, raw: dict[str, Any]) -> tuple[SettingsBody, list[str]]:
        return self._service.answering.parser.read(raw, SettingsBody, route="/set_internal_state")


def _refused(request: Request, why: str, *, status_code: int = 400) -> Response:
    """A refusal in plain text."""
    note_refusal(request.scope, why)
    return PlainTextResponse(f"{why}\n", status_code=status_code)


def _format_name(parser: str) -> str | None:
    return None if parser == "none" else parser
