"""SGLang's errors: OpenAI's shape with SGLang's types."""

from __future__ import annotations

from typing import Any

from setpoint.core.errors import err_type_of
from setpoint.frontend.apis.openai.openai_errors import body_with_type
from setpoint.frontend.http.sse import DONE, event
from setpoint.frontend.refusal import Refusal


def error_body(refusal: Refusal) -> dict[str, Any]:
    return body_with_type(refusal, err_type_of(refusal.status_code))


def stream_end(refusal: Refusal | None) -> bytes:
    """The end of a stream: ``[DONE]``, after an event that reports ``refusal``, if there is one."""
    return DONE if refusal is None else event(error_body(refusal)) + DONE
