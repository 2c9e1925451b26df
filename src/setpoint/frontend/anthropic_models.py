"""Anthropic's form of the list of models, which shares its path with OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from setpoint.frontend.config import FrontendConfig
from setpoint.frontend.refusal import Refusal

_VERSION_HEADER = "anthropic-version"
"""A header that Anthropic's clients send with every request, and no others do."""


def is_anthropics(headers: Mapping[str, str]) -> bool:
    """Whether a client of Anthropic's API sent a request with these headers."""
    return _VERSION_HEADER in headers


def model_page(models: Sequence[FrontendConfig], started_at: int) -> dict[str, Any]:
    """All models, on one page. started_at: when the server began to serve, in seconds since
    1970."""
    cards = [model_card(each, started_at) for each in models]
    return {
        "data": cards,
        "has_more": False,
        "first_id": cards[0]["id"],
        "last_id": cards[-1]["id"],
    }


def model_card(config: FrontendConfig, started_at: int) -> dict[str, Any]:
    return {
        "type": "model",
        "id": config.served_model_name,
        "display_name": config.served_model_name,
        "created_at": datetime.fromtimestamp(started_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_input_tokens": min(config.context_len, config.max_req_input_len) - 1,
        "max_tokens": config.max_model_len,
    }


def no_such_model(refusal: Refusal) -> dict[str, Any]:
    return {"type": "error", "error": {"type": "not_found_error", "message": refusal.message}}
