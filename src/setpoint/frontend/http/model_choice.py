"""Passes each request on to the application of the model that it names; ASGI middleware of a server
with several models.

A request names its model in the body (``model``, or ``name`` in Ollama's older bodies) or in the
query (``?model=``, for routes whose bodies name none). Without a name it is for the first model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from setpoint.core.excerpt import excerpt, quoted
from setpoint.frontend.http.body_reader import declared_bytes
from setpoint.frontend.http.dialect import Dialects
from setpoint.frontend.http.error_responses import error_response
from setpoint.frontend.json_shape import excess
from setpoint.frontend.refusal import Refusal

NAMES_NONE = ("", "default")
"""What a client sends as a model's name if it does not care."""
OLLAMA = "/api/"
"""Where models have tags, and older bodies another key for them."""
_OF_MEMORY = (
    "A server with several models loads and unloads them itself, so it refuses this route. Use"
    " /models/load and /models/unload."
)
_OF_ENGINES = (
    "A server with several models has one engine for each, and starts engines that have ended"
    " itself, so it refuses this route. /pause_generation?model=NAME pauses a model."
)
REFUSED = {
    "/release_memory_occupation": _OF_MEMORY,
    "/resume_memory_occupation": _OF_MEMORY,
    "/update_weights_from_disk": "A server with several models cannot update weights while it runs."
    " Start it again with the new files.",
    "/fault_tolerance/apply": _OF_ENGINES,
    "/v1/fault_tolerance/apply": _OF_ENGINES,
}
"""Routes that would interfere with the change of models -> what to do instead."""


class _Named(msgspec.Struct):
    """The fields may have any type, because ``name`` may mean another thing to a route."""

    model: Any = None
    name: Any = None


_decoder = msgspec.json.Decoder(_Named)


class ModelChoice:
    def __init__(
        self,
        app: ASGIApp,
        *,
        first: str,
        others: Mapping[str, ASGIApp],
        max_body_bytes: int,
        dialects: Dialects,
    ) -> None:
        """app: that of the model ``first``. others: those of the other models, by name."""
        self._apps = {first: app, **others}
        self._first = first
        self._max_bytes = max_body_bytes
        self._dialects = dialects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._apps[self._first](scope, receive, send)
            return
        named = _in_query(scope)
        is_read = declared_bytes(Headers(scope=scope)) <= self._max_bytes
        if named is None and scope["method"] in ("POST", "PUT") and is_read:
            body, is_whole = await self._read(receive)
            named = _in_body(bytes(body), scope["path"]) if is_whole else None
            receive = _again(body, is_whole, receive)
        if isinstance(named, str) and scope["path"].startswith(OLLAMA):
            named = named.removesuffix(":latest")
        refusal = self._refusal(scope["path"], named)
        if refusal is not None:
            await error_response(self._dialects, scope, refusal)(scope, receive, send)
            return
        await self._apps[self._known(named or "")](scope, receive, send)

    def _known(self, named: str) -> str:
        """The served name of a model; "" if there is none of this name."""
        if named in NAMES_NONE:
            return self._first
        return named if named in self._apps else ""

    def _refusal(self, path: str, named: Any) -> Refusal | None:
        names = ", ".join(self._apps)
        if not isinstance(named, str | None):
            message = (
                f"model must be the name of a model ({names}), got {excerpt(repr(named), 64)}."
            )
            return Refusal(message=message, status_code=400, param="model")
        if path in REFUSED:
            return Refusal(message=REFUSED[path], status_code=400)
        if named is None and path in self._dialects.controls:
            message = (
                f"This server has several models. Name the one that you mean: {path}?model=NAME,"
                f" where NAME is one of {names}."
            )
            return Refusal(message=message, status_code=400)
        if named is not None and not self._known(named):
            return Refusal(
                message=f"The model {quoted(named, 64)} does not exist; there are {names}.",
                status_code=404,
                param="model",
                code="model_not_found",
            )
        return None

    async def _read(self, receive: Receive) -> tuple[bytearray, bool]:
        """The body as far as it may be long, and whether that is all of it."""
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return body, False
            body += message.get("body", b"")
            if not message.get("more_body", False):
                return body, True
            if len(body) > self._max_bytes:
                return body, False


def _again(body: bytearray, is_whole: bool, receive: Receive) -> Receive:
    """Receives what has been read of a body once more, and then what follows."""
    pending: list[Message] = [
        {"type": "http.request", "body": bytes(body), "more_body": not is_whole}
    ]

    async def again() -> Message:
        return pending.pop() if pending else await receive()

    return again


def _in_query(scope: Scope) -> str | None:
    query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
    return query["model"][-1] if "model" in query else None


def _in_body(body: bytes, path: str) -> Any:
    """The value in the place of a body's model name. None if there is none, or if the body exceeds
    a limit or is no JSON object: the route will refuse such a body."""
    if not body or excess(body) is not None:
        return None
    try:
        named: _Named = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return named.name if named.model is None and path.startswith(OLLAMA) else named.model
