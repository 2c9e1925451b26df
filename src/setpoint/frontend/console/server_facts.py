"""The facts about the server that the console shows: what it is, what it has room for, and how its
options were resolved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from setpoint.core.handover import HandoverCounts
from setpoint.frontend.live_options import LiveOption
from setpoint.frontend.service import Service

_LIMITS = ("max_running_requests", "max_prefill_tokens", "chunked_prefill_size")


async def facts_of(service: Service, models: Sequence[Service]) -> dict[str, Any]:
    """The facts about the server that the console shows. Raises EngineDeadError."""
    config, info = service.config, await service.info.now()
    states = info["internal_states"]
    state = states[0]  # the engines are alike, but for what they have done
    return {
        "model": config.served_model_name,
        "model_path": service.weights.model_path,
        "models": [
            {"name": each.config.served_model_name, "state": each.residence.state}
            for each in models
        ],
        "version": info.get("version"),
        "device": info.get("accelerator") or info.get("device"),
        "dtype": info.get("dtype"),
        "command": info.get("launch_command"),
        "chats": config.pooling is None and service.answering.text.has_chat_template,
        "context_len": config.context_len,
        "pool_tokens": info.get("max_total_num_tokens"),
        "memory_gb": state["memory_usage"],
        "limits": {name: state["settings"].get(name) for name in _LIMITS},
        "experts": state.get("experts"),
        "tiers": [each.get("tiers") for each in states],
        "handover": [_named(each.get("handover")) for each in states],
        "paused": state["paused"],
        "options": _options(info["decisions"], service.live.frontend.described),
    }


def _named(counts: Sequence[Any] | None) -> dict[str, Any] | None:
    """The counts of a HandoverCounts, which travels without names."""
    if counts is None:
        return None
    return dict(zip(HandoverCounts.__struct_fields__, counts, strict=True))


def _options(
    decisions: list[Mapping[str, Any]], described: Mapping[str, LiveOption]
) -> list[dict[str, Any]]:
    """One for each option; of several decisions about one the last is in force. ``live``: what is
    known of an option that can change now."""
    latest = {each["field"]: each for each in decisions}
    found = []
    for name, decision in latest.items():
        option = {key: decision[key] for key in ("field", "value", "why", "warn")}
        live = described.get(name)
        found.append(option if live is None else option | {"live": asdict(live)})
    return found
