"""Anthropic's shape of an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from setpoint.frontend.http.sse import named_event
from setpoint.frontend.refusal import Refusal

_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Status -> type. Any other status below 500 is ``invalid_request_error``."""


def error_body(refusal: Refusal) -> dict[str, Any]:
    status = refusal.status_code
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": _message(refusal)}}


def _message(refusal: Refusal) -> str:
    """The message, which for a prompt that is too long begins with the words by which Anthropic's
    clients know that they must shorten the conversation."""
    if refusal.excess is None:
        return refusal.message
    num_prompt, max_prompt = refusal.excess
    return f"prompt is too long: {num_prompt} tokens > {max_prompt} maximum. {refusal.message}"


def stream_end(refusal: Refusal | None) -> bytes:
    """The last event of a stream: ``message_stop``, or an error."""
    if refusal is None:
        return named_event("message_stop", {"type": "message_stop"})
    return named_event("error", error_body(refusal))
