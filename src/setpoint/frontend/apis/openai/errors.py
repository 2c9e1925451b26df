"""OpenAI's shape of an error, which SGLang's native routes also use."""

from __future__ import annotations

from typing import Any

from setpoint.frontend.http.sse import DONE, event
from setpoint.frontend.refusal import Refusal


def error_body(refusal: Refusal) -> dict[str, Any]:
    """The body of an error: SGLang's flat keys, and the same again under ``error``, where OpenAI's
    clients look."""
    error = {
        "message": refusal.message,
        "type": refusal.kind,
        "param": refusal.param,
        "code": refusal.code or refusal.status_code,
    }
    return {"object": "error", **error, "error": error}


def stream_end(refusal: Refusal | None) -> bytes:
    """The end of a stream: ``[DONE]``, after an event that reports ``refusal``, if there is one."""
    return DONE if refusal is None else event(error_body(refusal)) + DONE
