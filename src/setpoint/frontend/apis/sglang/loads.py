"""Reports how busy the engine is, for load balancers and autoscalers (docs/sglang/api.md#loads)."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from setpoint.core.errors import RequestError
from setpoint.frontend.http.errors import json_response
from setpoint.frontend.http.openapi import add_route
from setpoint.frontend.service import Service

SECTIONS = ("core", "memory", "spec", "lora", "disagg", "queues", "all")
"""The sections that ``include`` may name. Only the first two have content."""


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
        if layout != "json":
            raise RequestError(f"format is {layout!r}; the loads are served as json only.")
        if unknown := sorted(sections - set(SECTIONS)):
            raise RequestError(f"include has {unknown[0]!r}; it may name {', '.join(SECTIONS)}.")
        info = await self._service.server_info()
        load = _load(info)
        if sections & {"memory", "all"}:
            load["memory"] = _memory(info)
        return json_response(
            {
                "timestamp": datetime.now(UTC).isoformat(),
                "version": info["version"],
                "accelerator": info["accelerator"],
                "num_accelerators": 1,
                "loads": [load],
            }
        )

    async def load(self) -> Response:
        """The answer that older routers poll."""
        load = _load(await self._service.server_info())
        running, waiting = load["num_running_reqs"], load["num_waiting_reqs"]
        return json_response(
            [
                {
                    "dp_rank": 0,
                    "num_reqs": running + waiting,
                    "num_waiting_reqs": waiting,
                    "num_tokens": load["num_total_tokens"],
                }
            ]
        )


def _load(info: dict[str, Any]) -> dict[str, Any]:
    """The core section. All tokens of waiting requests count as uncached, because their prefixes
    have not been matched yet."""
    (state,) = info["internal_states"]
    pool, pending = state["pool"], state["num_pending_tokens"]
    used = pool["total"] - pool["free"] - pool["evictable"]
    usage = used / pool["total"]
    return {
        "dp_rank": 0,
        "timestamp": time.time(),
        "num_running_reqs": state["num_running"],
        "num_waiting_reqs": state["num_queued"],
        "num_paused_reqs": state["num_paused_reqs"],
        "num_waiting_uncached_tokens": pending,
        "num_used_tokens": used,
        "num_total_tokens": used + pending,
        "num_active_tokens": used + pending,
        "max_total_num_tokens": info["max_total_num_tokens"],
        "max_running_requests": info["max_running_requests"],
        "token_usage": round(usage, 4),
        "gen_throughput": round(state["last_gen_throughput"], 2),
        "cache_hit_rate": round(state["cache_hit_rate"], 4),
        "utilization": round(max(usage, state["num_running"] / info["max_running_requests"]), 4),
    }


def _memory(info: dict[str, Any]) -> dict[str, Any]:
    (state,) = info["internal_states"]
    gib = state["memory_usage"]
    return {
        "weight_gb": round(gib["weight"], 3),
        "kv_cache_gb": round(gib["kvcache"], 3),
        "graph_gb": round(gib["graph"], 3),
        "token_capacity": info["max_total_num_tokens"],
    }
