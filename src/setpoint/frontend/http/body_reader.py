"""Request bodies over HTTP: content type, size, and the thread that processes them.
``frontend.bodies`` handles their content."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.requests import Request

from setpoint.core.excerpt import excerpt
from setpoint.frontend.arrival import ARRIVAL, IN_SCOPE
from setpoint.frontend.bodies import InvalidBodyError, decode_object
from setpoint.frontend.jobs import SequenceOutput

T = TypeVar("T")

_INLINE_BYTES = 1 << 16
"""Longest body that is processed on the event loop itself; takes some milliseconds."""

_INLINE_NUMBERS = 1 << 13
"""Most logprobs and other numbers of an answer that is made on the event loop itself; takes about
ten milliseconds."""


class BodyReader:
    """Reads bodies, and runs the work on them and the making of answers: long ones in a thread, so
    that other clients' streams continue meanwhile."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        # One thread, because each further one makes the event loop wait longer for the
        # interpreter's lock.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bodies")

    async def read(self, request: Request, work: Callable[[dict[str, Any]], Awaitable[T]]) -> T:
        """The result of ``work`` for the body, a JSON object. ``work`` may run in another thread,
        on an event loop of its own.

        Raises what ``work`` raises, and InvalidBodyError: 400 malformed, or sent by a browser under
        another content type than JSON's, 413 too large. A web page may send other content types to
        any server, but for JSON its browser first asks the server for permission (CORS). Programs
        may send any type, or none: Ollama's clients and curl do.
        """
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json" and _is_of_a_browser(request.headers):
            raise InvalidBodyError(_content_type_advice(content_type))
        came = request.scope[IN_SCOPE]
        came.headers, came.path = request.headers, request.url.path
        token = ARRIVAL.set(came)
        try:
            return await self._work(await self._receive(request), work)
        finally:
            ARRIVAL.reset(token)  # tasks that the answer starts later are not this request

    async def _work(self, body: bytes, work: Callable[[dict[str, Any]], Awaitable[T]]) -> T:
        async def decode_and_work() -> T:
            return await work(decode_object(body))

        if len(body) <= _INLINE_BYTES:
            return await decode_and_work()
        context = copy_context()  # the thread has the arrival of the request, too
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, lambda: context.run(lambda: asyncio.run(decode_and_work()))
        )

    async def answer(self, outputs: Sequence[SequenceOutput], make: Callable[[], T]) -> T:
        """The result of ``make``, which runs in the thread if ``outputs`` have many numbers: each
        becomes an object and text."""
        return await self.beside(sum(output.num_numbers for output in outputs), make)

    async def beside(self, num_numbers: int, make: Callable[[], T]) -> T:
        """The result of ``make`` for as many numbers, which runs in the thread if they are
        many."""
        if num_numbers <= _INLINE_NUMBERS:
            return make()
        return await asyncio.get_running_loop().run_in_executor(self._thread, make)

    async def _receive(self, request: Request) -> bytes:
        body = bytearray()
        # Before the first byte is asked for: a client may wait for "100 Continue" to send it.
        self._check_size(declared_bytes(request.headers))
        async for chunk in request.stream():
            body += chunk
            self._check_size(len(body))
        return bytes(body)

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise InvalidBodyError(
                f"The body is larger than {self._max_bytes} bytes, the limit of this server"
                " (--max-body-bytes). Send several requests with a part of it each.",
                status_code=413,
            )


def declared_bytes(headers: Headers) -> int:
    """The length of a body that its request states; 0 if it states none."""
    value = headers.get("content-length", "")
    return int(value) if value.isdecimal() else 0


def _is_of_a_browser(headers: Headers) -> bool:
    """Browsers, and only they, say where a request comes from; a page cannot prevent it."""
    return "origin" in headers or "sec-fetch-site" in headers


def _content_type_advice(content_type: str) -> str:
    came = f"the content type {excerpt(content_type, 100)}" if content_type else "no content type"
    return (
        "Add the header 'Content-Type: application/json' to the request: a browser sent it with"
        f" {came}, as a page of any site can make it do."
    )
