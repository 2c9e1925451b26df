"""Reports how busy the engine is, for load balancers and autoscalers (docs/sglang/api.md#loads)."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from fastapi.responses import PlainTextResponse

from setpoint import __version__
from setpoint.core.control import EngineFacts, InternalState
from setpoint.core.errors import RequestError
from setpoint.frontend.http.error_responses import json_response
from setpoint.frontend.http.openapi import add_route
from setpoint.frontend.service import Service

SECTIONS = ("core", "memory", "spec", "lora", "disagg", "queues", "all")
"""The sections that ``include`` may name. Core, memory and queues have content."""


EXPOSITION = "text/plain; version=0.0.4"
"""Content type of Prometheus' text format."""


class LoadRoutes:
    """The load routes, for the one data-parallel rank, 0."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def install(self, parent: APIRouter) -> None:
        router = APIRouter(tags=["admin"])
        add_route(router, "/v1/loads", self.loads, "GET", "HEAD")
        add_route(router, "/get_load", self.load, "GET", "HEAD")
        parent.include_router(router)

    async def loads(
        self,
        dp_rank: int = 0,
        include: str = "all",
        layout: Annotated[str, Query(alias="format")] = "json",
    ) -> Response:
        """The load of the engine. include: names of SECTIONS, separated by commas; core is always
        included."""
        sections = {name.strip() for name in include.split(",")}
        if dp_rank != 0:
            raise RequestError(f"dp_rank is {dp_rank}; there is one data-parallel rank, 0.")
        if layout not in ("json", "prometheus"):
            raise RequestError(f"format is {layout!r}; it may be json or prometheus.")
        if unknown := sorted(sections - set(SECTIONS)):
            raise RequestError(f"include has {unknown[0]!r}; it may name {', '.join(SECTIONS)}.")
        line = self._service.engine.choose()
        state, facts = await line.get_state(), line.facts
        load = _load(state, facts)
        if sections & {"memory", "all"}:
            load["memory"] = _memory(state, facts)
        if sections & {"queues", "all"}:
            load["queues"] = _queues(state)
        if layout == "prometheus":
            return PlainTextResponse(_exposition(load), media_type=EXPOSITION)
        return json_response(
            {
                "timestamp": datetime.now(UTC).isoformat(),
                "version": __version__,
                "accelerator": facts.accelerator,
                "num_accelerators": 1,
                "loads": [load],
            }
        )

    async def load(self) -> Response:
        """The answer that older routers poll."""
        state = await self._service.engine.choose().get_state()
        return json_response(
            [
                {
                    "dp_rank": 0,
                    "num_reqs": state.num_running + state.num_queued,
                    "num_waiting_reqs": state.num_queued,
                    "num_tokens": state.pool.used + state.num_pending_tokens,
                }
            ]
        )


def _load(state: InternalState, facts: EngineFacts) -> dict[str, Any]:
    """The core section."""
    pool, figures = state.pool, state.report.figures
    total = pool.used + state.num_pending_tokens
    return {
        "dp_rank": 0,
        "timestamp": time.time(),
        "num_running_reqs": state.num_running,
        "num_waiting_reqs": state.num_queued,
        "num_paused_reqs": state.num_paused_reqs,
        "num_waiting_uncached_tokens": state.num_pending_tokens,
        "num_used_tokens": pool.used,
        "num_total_tokens": total,
        "num_active_tokens": total,
        "max_total_num_tokens": facts.max_total_num_tokens,
        "max_running_requests": state.settings.max_running_requests,
        "token_usage": round(pool.usage, 4),
        "gen_throughput": round(figures.last_gen_throughput, 2),
        "cache_hit_rate": round(figures.cache_hit_rate, 4),
        "utilization": round(state.utilization, 4),
    }


def _queues(state: InternalState) -> dict[str, Any]:
    """The numbers of requests that do not run, by where they are. Retracted ones also count as
    waiting."""
    return {
        "waiting": state.num_waiting,
        "grammar": state.num_preparing,
        "paused": state.num_paused_reqs,
        "retracted": state.num_retracted,
    }


def _exposition(load: dict[str, Any]) -> str:
    """The numbers as gauges in Prometheus' text format; those of a section are prefixed with its
    name."""
    labels, lines = f'{{dp_rank="{load["dp_rank"]}"}}', []
    for name, value in load.items():
        found = value if isinstance(value, dict) else {"": value}
        for key, number in found.items():
            if name not in ("dp_rank", "timestamp"):
                gauge = f"sglang:{name}_{key}" if key else f"sglang:{name}"
                lines += [f"# TYPE {gauge} gauge", f"{gauge}{labels} {number}"]
    return "\n".join(lines) + "\n"


def _memory(state: InternalState, facts: EngineFacts) -> dict[str, Any]:
    usage = state.report.memory_usage
    return {
        "weight_gb": round(usage.weight, 3),
        "kv_cache_gb": round(usage.kvcache, 3),
        "graph_gb": round(usage.graph, 3),
        "token_capacity": facts.max_total_num_tokens,
    }
