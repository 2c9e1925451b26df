"""OpenAI's shape of an error, in which SGLang's native routes refuse, too."""

from __future__ import annotations

from typing import Any

from setpoint.frontend.http.sse import DONE, event
from setpoint.frontend.refusal import Refusal


def error_body(refusal: Refusal) -> dict[str, Any]:
    """SGLang's flat keys, and the same again under ``error``, where OpenAI's clients look."""
    error = {
        "message": refusal.message,
        "type": refusal.kind,
        "param": refusal.param,
        "code": refusal.code or refusal.status_code,
    }
    return {"object": "error", **error, "error": error}


def stream_end(refusal: Refusal | None) -> bytes:
    """``[DONE]``, after an event that tells of ``refusal``."""
    return DONE if refusal is None else event(error_body(refusal)) + DONE
