"""Request bodies over HTTP: size limit, content type, a JSON object. What is in the object is ``frontend.bodies``' business."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from setpoint.core.shown import shown
from setpoint.frontend.bodies import MAX_BODY_BYTES, InvalidBodyError, decode_object


async def read_object(request: Request) -> dict[str, Any]:
    """The body as a JSON object. Raises InvalidBodyError: 400 malformed or not said to be JSON, 413 larger than MAX_BODY_BYTES.

    A web page may send any other content type to any server without asking; for JSON its browser asks first (CORS).
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise InvalidBodyError(_content_type_advice(content_type))
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise InvalidBodyError(f"The body is larger than {MAX_BODY_BYTES} bytes.", status_code=413)
    return decode_object(body)


def _content_type_advice(content_type: str) -> str:
    advice = "Add the header 'Content-Type: application/json' to the request (with curl: -H 'Content-Type: application/json'): "
    if content_type == "application/x-www-form-urlencoded":
        return f"{advice}it came with {content_type}, which curl sends with -d if no header is given."
    return advice + (f"it came with {shown(content_type, 100)}." if content_type else "it came without a content type.")
