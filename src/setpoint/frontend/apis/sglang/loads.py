"""Reports how busy the engines are, for load balancers and autoscalers
(docs/sglang/api.md#loads)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from setpoint.core.control import EngineFacts, InternalState
from setpoint.core.errors import EngineDeadError, RequestError
from setpoint.core.handover import HandoverCounts
from setpoint.core.version import __version__
from setpoint.frontend.http.api_routes import Routes
from setpoint.frontend.http.error_responses import json_response
from setpoint.frontend.http.queries import read_query
from setpoint.frontend.info import Info

SECTIONS = ("core", "memory", "spec", "lora", "disagg", "queues", "all")
"""The sections that ``include`` may name. spec and lora have no content yet,
and disagg has some on prefill and decode servers."""


EXPOSITION = "text/plain; version=0.0.4"
"""Content type of Prometheus' text format."""


@dataclass(slots=True, frozen=True)
class LoadsQuery:
    dp_rank: int | None = None
    """None: all of them."""
    include: str = "all"
    """Names of SECTIONS, separated by commas."""
    format: str = "json"


class LoadRoutes:
    """The load routes; each data-parallel rank has an entry."""

    def __init__(self, info: Info) -> None:
        self._info = info

    def install(self, parent: Routes) -> None:
        routes = parent.tagged("admin")
        routes.add("/v1/loads", self.loads, "GET", "HEAD", query=LoadsQuery)
        routes.add("/get_load", self.load, "GET", "HEAD")

    async def loads(self, request: Request) -> Response:
        """The loads of the engines. dp_rank: return only the load of this rank. include: names of
        SECTIONS, separated by commas; core is always included."""
        query = read_query(request, LoadsQuery)
        dp_rank, layout = query.dp_rank, query.format
        sections = {name.strip() for name in query.include.split(",")}
        num_ranks = len(self._info.engine.lines)
        if dp_rank is not None and not 0 <= dp_rank < num_ranks:
            raise RequestError(f"dp_rank is {dp_rank}; the last rank is {num_ranks - 1}.")
        if layout not in ("json", "prometheus"):
            raise RequestError(f"format must be json or prometheus, got {layout!r}.")
        if unknown := sorted(sections - set(SECTIONS)):
            raise RequestError(f"include has {unknown[0]!r}; it may name {', '.join(SECTIONS)}.")
        found = [
            (line, state)
            for line, state in await self._info.states()
            if dp_rank in (None, line.rank)
        ]
        if not found:
            raise EngineDeadError(f"The engine of rank {dp_rank} takes no requests now.")
        loads = [_load(line.rank, state, line.facts, sections) for line, state in found]
        if layout == "prometheus":
            return PlainTextResponse(_exposition(loads), media_type=EXPOSITION)
        return json_response(
            {
                "timestamp": datetime.now(UTC).isoformat(),
                "version": __version__,
                "accelerator": found[0][0].facts.accelerator,
                "num_accelerators": num_ranks,
                "loads": loads,
            }
        )

    async def load(self, request: Request) -> Response:
        """The answer for older routers, which poll this route."""
        return json_response(
            [
                {
                    "dp_rank": line.rank,
                    "num_reqs": state.num_running + state.num_queued,
                    "num_waiting_reqs": state.num_queued,
                    "num_tokens": state.pool.used + state.num_pending_tokens,
                }
                for line, state in await self._info.states()
            ]
        )


def _load(
    rank: int, state: InternalState, facts: EngineFacts, sections: set[str]
) -> dict[str, Any]:
    load = _core(rank, state, facts)
    if sections & {"memory", "all"}:
        load["memory"] = _memory(state, facts)
    if sections & {"queues", "all"}:
        load["queues"] = _queues(state)
    if sections & {"disagg", "all"} and state.handover is not None:
        load["disaggregation"] = _disaggregation(state.handover)
    return load


def _disaggregation(counts: HandoverCounts) -> dict[str, Any]:
    """The numbers of requests that wait for the server that computes their other part."""
    is_prefill = counts.role == "prefill"
    waiting, moving = (
        ("num_prefill_bootstrap_queue_reqs", "num_prefill_inflight_queue_reqs")
        if is_prefill
        else ("num_decode_prealloc_queue_reqs", "num_decode_transfer_queue_reqs")
    )
    return {"mode": counts.role, waiting: counts.num_waiting, moving: counts.num_moving}


def _core(rank: int, state: InternalState, facts: EngineFacts) -> dict[str, Any]:
    """The core section."""
    pool, figures = state.pool, state.report.figures
    total = pool.used + state.num_pending_tokens
    return {
        "dp_rank": rank,
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
    """The numbers of requests that do not run, by the place where they wait. Retracted requests
    also count as waiting."""
    return {
        "waiting": state.num_waiting,
        "grammar": state.num_preparing,
        "paused": state.num_paused_reqs,
        "retracted": state.num_retracted,
    }


def _exposition(loads: list[dict[str, Any]]) -> str:
    """The numbers as gauges in Prometheus' text format. The name of a section is the prefix of its
    gauges."""
    samples: dict[str, list[str]] = {}
    for load in loads:
        labels = f'{{dp_rank="{load["dp_rank"]}"}}'
        for name, value in load.items():
            found = value if isinstance(value, dict) else {"": value}
            for key, number in found.items():
                if name not in ("dp_rank", "timestamp") and key != "mode":
                    gauge = f"sglang:{name}_{key}" if key else f"sglang:{name}"
                    samples.setdefault(gauge, []).append(f"{gauge}{labels} {number}")
    lines = [line for gauge, each in samples.items() for line in (f"# TYPE {gauge} gauge", *each)]
    return "\n".join(lines) + "\n"


def _memory(state: InternalState, facts: EngineFacts) -> dict[str, Any]:
    usage = state.report.memory_usage
    return {
        "weight_gb": round(usage.weight, 3),
        "kv_cache_gb": round(usage.kvcache, 3),
        "graph_gb": round(usage.graph, 3),
        "token_capacity": facts.max_total_num_tokens,
    }
