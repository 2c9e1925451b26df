"""Request bodies: bytes to checked msgspec structs, with 400 (not 422) for anything else.

Keys that a route does not know are ignored as SGLang does, but not in silence: each is logged once. Keys it knows and
cannot honour are refused by name unless they ask for nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
from fastapi import Request

from setpoint.core.errors import RequestError
from setpoint.frontend.http.errors import InvalidBodyError

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 20

T = TypeVar("T", bound=msgspec.Struct)

_MAX_LOGGED_KEYS = 256
_logged_keys: set[tuple[str, str]] = set()


async def read_object(request: Request) -> dict[str, Any]:
    """The body as a JSON object. Raises InvalidBodyError: 400 malformed, 413 larger than MAX_BODY_BYTES."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise InvalidBodyError(f"The body is larger than {MAX_BODY_BYTES} bytes.", status_code=413)
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidBodyError(f"The body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidBodyError(f"The body must be a JSON object, not {type(value).__name__}.")
    return value


async def read_openai_object(request: Request) -> dict[str, Any]:
    """As ``read_object``, for ``/v1/*``: the content type must be application/json."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise InvalidBodyError(f"The content type must be application/json, not {content_type or 'missing'}.")
    return await read_object(request)


def parse(body: dict[str, Any], kind: type[T], *, route: str, unsupported: Iterable[str] = ()) -> T:
    """The body as ``kind``. Raises RequestError (400) for an unsupported key with a meaning, InvalidBodyError for wrong types."""
    for key in unsupported:
        if asks_for_something(body.get(key)):
            raise RequestError(f"{key} is not supported by this server yet.")
    try:
        parsed = msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise InvalidBodyError(f"{error}.") from None
    for key in body.keys() - set(kind.__struct_fields__) - set(unsupported):
        _log_ignored(route, key)
    return parsed


def asks_for_something(value: Any) -> bool:
    """False for null, false, "" and empty containers, and for lists of only such values (one per prompt of a batch)."""
    if isinstance(value, list):
        return any(asks_for_something(item) for item in value)
    return value not in (None, False, "", {})


def _log_ignored(route: str, key: str) -> None:
    if (route, key) not in _logged_keys and len(_logged_keys) < _MAX_LOGGED_KEYS:
        _logged_keys.add((route, key))
        logger.warning("Ignored the unknown key %.64r of %s (logged once per key).", key, route)
