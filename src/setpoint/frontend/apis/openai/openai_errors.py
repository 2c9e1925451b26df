"""Makes errors in OpenAI's shape, which SGLang's native routes also use, with OpenAI's types."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from http import HTTPStatus
from typing import Any

import msgspec

from setpoint.core.constraint import INVALID_TOOL, KINDS, compile_refusal
from setpoint.core.errors import ContextLengthError
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.http.sse import DONE, event
from setpoint.frontend.refusal import Refusal

_BODIES = "setpoint.frontend.apis."
_FIELD = re.compile(r"(([a-z_]+)(?:\[\d+\]|\.[a-z_]+)*)(?=[ :])")
"""Matches the path with which a message about a field of the body begins."""


def _field_of(message: str) -> str | None:
    """The path of the field that a message is about, if it begins with one or with the words that
    refuse a constraint."""
    for kind in KINDS:
        if message.startswith(compile_refusal(kind)):
            return kind
    if message.startswith(INVALID_TOOL):
        return "tools"
    found = _FIELD.match(message)
    if found is None or ("_" not in found[2] and found[2] not in _plain_fields()):
        return None
    return found[1]


@cache
def _plain_fields() -> frozenset[str]:
    """The names of fields that a client may send and that look like ordinary words."""
    names: set[str] = set()
    kinds = [*msgspec.Struct.__subclasses__()]
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        if kind is SamplingParams or kind.__module__.startswith(_BODIES):
            names.update(kind.__struct_fields__)
    return frozenset(names)


def openai_type(status_code: int) -> str:
    """OpenAI's ``type`` of an error with this HTTP status."""
    if status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return "server_error"
    is_too_much = status_code == HTTPStatus.TOO_MANY_REQUESTS
    return "rate_limit_error" if is_too_much else "invalid_request_error"


_CODES: Mapping[int, str] = {
    HTTPStatus.UNAUTHORIZED: "invalid_api_key",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_exceeded",
}
"""Status -> OpenAI's code, where it follows from the status."""


def openai_code(refusal: Refusal) -> str | None:
    """OpenAI's ``code`` of an error; None where clients have nothing to act on."""
    return refusal.code or _CODES.get(refusal.status_code)


def error_body(refusal: Refusal) -> dict[str, Any]:
    return body_with_type(refusal, openai_type(refusal.status_code))


def body_with_type(refusal: Refusal, kind: str) -> dict[str, Any]:
    """The body of an error: SGLang's flat keys, and the same keys again under ``error``, where
    OpenAI's clients look for them. ``code`` is the status as SGLang has it, and under ``error``
    OpenAI's word."""
    is_about_body = refusal.status_code == HTTPStatus.BAD_REQUEST
    message = refusal.message
    if refusal.code == ContextLengthError.code:
        # LangChain looks for the code in the text, where OpenAI's clients before 3 put the body.
        message = f"{message.rstrip('.')} ({refusal.code})."
    error = {
        "message": message,
        "type": kind,
        "param": refusal.param or (_field_of(refusal.message) if is_about_body else None),
    }
    return {
        "object": "error",
        **error,
        "code": refusal.status_code,
        "error": {**error, "code": openai_code(refusal)},
    }


def stream_end(refusal: Refusal | None) -> bytes:
    """The end of a stream: ``[DONE]``, after an event that reports ``refusal``, if there is one."""
    return DONE if refusal is None else event(error_body(refusal)) + DONE
