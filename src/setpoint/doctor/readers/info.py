"""Reads facts about a server from its answer to ``/server_info``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from setpoint.doctor.observations import Evidence, Facts

GIB = 1 << 30
SAID = (
    "max_running_requests",
    "max_total_num_tokens",
    "chunked_prefill_size",
    "max_prefill_tokens",
)
"""Facts that checks quote."""


def facts_of(info: Mapping[str, Any], *, engine: Literal["setpoint", "sglang"]) -> Facts:
    """The facts in an answer to ``/server_info`` of Setpoint, or of SGLang in any version. What the
    answer does not have is unknown."""
    states = info.get("internal_states")
    state = states[0] if isinstance(states, list) and states else {}
    state = state if isinstance(state, Mapping) else {}
    memory = _mapping(state.get("memory_usage"))
    options = {
        name: value
        for name, value in info.items()
        if value is None or isinstance(value, bool | int | float | str)
    }
    facts = Facts(
        engine=engine,
        version=_text(info.get("version")),
        model=_text(info.get("served_model_name")) or _text(info.get("model_path")),
        device=_device(info.get("device")),
        options=options,
        start_values=dict(_mapping(info.get("start_values"))),
        max_total_num_tokens=_count(info, "max_total_num_tokens")
        or _count(memory, "token_capacity"),
        max_running_requests=_count(state, "effective_max_running_requests_per_dp")
        or _count(info, "max_running_requests"),
        chunked_prefill_size=_count(info, "chunked_prefill_size"),
        max_prefill_tokens=_count(info, "max_prefill_tokens"),
        context_len=_count(info, "context_length") or _count(info, "max_req_len"),
        weights_gb=_number(memory.get("weight")) or _gib(info.get("weight_bytes")),
        kv_gb=_number(memory.get("kvcache")) or _gib(info.get("kv_bytes")),
        graph_gb=_number(memory.get("graph")),
        available_gb=_gib(info.get("available_bytes")),
        total_gb=_gib(info.get("total_bytes")),
    )
    tell(facts, "The server says")
    return facts


def tell(facts: Facts, who: str) -> None:
    """Add the evidence for the facts that checks quote. who: "The server says", …"""
    for name in SAID:
        if getattr(facts, name) is not None:
            facts.said[name] = Evidence(0, f"{who} {name}={getattr(facts, name)}.")


def _device(value: Any) -> Literal["gpu", "cpu"] | None:
    if not isinstance(value, str):
        return None
    return "cpu" if value == "cpu" else "gpu"


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else None


def _count(values: Mapping[str, Any], name: str) -> int | None:
    value = _number(values.get(name))
    return None if value is None else int(value)


def _gib(num_bytes: Any) -> float | None:
    value = _number(num_bytes)
    return None if value is None else value / GIB
