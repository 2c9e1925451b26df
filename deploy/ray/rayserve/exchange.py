"""Carries HTTP between the ingress and a replica: a request is one value, and an answer is a stream
of parts, which an ASGI application makes. It knows nothing of Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Scope

Headers = list[tuple[bytes, bytes]]

FULL = 64
"""Number of parts of an answer that may wait for their reader before the application has to
wait."""


@dataclass(slots=True, frozen=True)
class HttpRequest:
    """A request with its whole body."""

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    client: tuple[str, int] | None = None

    @property
    def scope(self) -> Scope:
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "method": self.method,
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": self.query,
            "root_path": "",
            "headers": self.headers,
            "client": self.client,
            "server": None,
        }


@dataclass(slots=True, frozen=True)
class Start:
    """The first part of an answer; the other parts are bytes of its body."""

    status: int
    headers: Headers


async def answer(app: ASGIApp, request: HttpRequest) -> AsyncIterator[Start | bytes]:
    """The parts of the application's answer. If the reader stops reading, the application learns
    that its client has disconnected, as with any listener. Raises what the application raises."""
    messages: asyncio.Queue[Message | None] = asyncio.Queue(FULL)
    gone = asyncio.Event()
    bodies = [request.body]

    async def receive() -> Message:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if not gone.is_set():
            await messages.put(message)

    async def work() -> None:
        try:
            await app(request.scope, receive, send)
        finally:
            if not gone.is_set():
                await messages.put(None)

    working = asyncio.create_task(work())
    try:
        while (message := await messages.get()) is not None:
            if message["type"] == "http.response.start":
                yield Start(message["status"], list(message["headers"]))
                continue
            # Everything that has come meanwhile goes into one part, because sending a part costs
            # more than a token.
            body, is_over = _body(message), False
            while not messages.empty():
                more = messages.get_nowait()
                if more is None:
                    is_over = True
                    break
                body += _body(more)
            if body:
                yield body
            if is_over:
                break
        await working
    finally:
        gone.set()
        while not messages.empty():  # a blocked sender can continue
            messages.get_nowait()
        with suppress(Exception):
            await working


def _body(message: dict[str, Any] | Message) -> bytes:
    return bytes(message.get("body", b""))
