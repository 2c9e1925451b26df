"""OpenAI's shape of an error, which SGLang's native routes also use, and OpenAI's types."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any

from setpoint.frontend.http.sse import DONE, event
from setpoint.frontend.refusal import Refusal

_FIELD = re.compile(r"([a-z_]+(?:\[\d+\]|\.[a-z_]+)*)(?=[ :])")
"""A message about a field of the body begins with its path, any other with a capital letter."""


def openai_type(status_code: int) -> str:
    """OpenAI's ``type`` of an error with this HTTP status."""
    if status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return "server_error"
    is_too_much = status_code == HTTPStatus.TOO_MANY_REQUESTS
    return "rate_limit_error" if is_too_much else "invalid_request_error"


def error_body(refusal: Refusal) -> dict[str, Any]:
    return body_with_type(refusal, openai_type(refusal.status_code))


def body_with_type(refusal: Refusal, kind: str) -> dict[str, Any]:
    """The body of an error: SGLang's flat keys, and the same again under ``error``, where OpenAI's
    clients look."""
    field = _FIELD.match(refusal.message) if refusal.status_code == HTTPStatus.BAD_REQUEST else None
    error = {
        "message": refusal.message,
        "type": kind,
        "param": refusal.param or (field and field[0]),
        "code": refusal.code or refusal.status_code,
    }
    return {"object": "error", **error, "error": error}


def stream_end(refusal: Refusal | None) -> bytes:
    """The end of a stream: ``[DONE]``, after an event that reports ``refusal``, if there is one."""
    return DONE if refusal is None else event(error_body(refusal)) + DONE
