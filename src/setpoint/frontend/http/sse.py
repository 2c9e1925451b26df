"""Server-sent events over ASGI, and the detection of clients that go away. Works on byte chunks and
Jobs; the route decides what is in a chunk.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from setpoint.core.errors import SetpointError
from setpoint.frontend.arrival import IN_SCOPE
from setpoint.frontend.jobs import ClientGoneError, Job
from setpoint.frontend.refusal import Refusal, refusal_of

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"

LONG_WRITE = 1 << 16
"""Bytes of a write after which other work gets a turn; more than these the server does not hold
for a slow client without making the next write wait."""

_encoder = msgspec.json.Encoder()

_SEPARATORS = [(chr(code).encode(), b"\\u%04x" % code) for code in (0x85, 0x2028, 0x2029)]


def one_line(content: Any) -> bytes:
    """JSON that everybody reads as one line. Python's ``str.splitlines``, and with it httpx's
    ``iter_lines``, also ends lines at U+0085, U+2028 and U+2029, which JSON may hold unescaped."""
    encoded = _encoder.encode(content)
    if not encoded.isascii():
        for separator, escape in _SEPARATORS:
            encoded = encoded.replace(separator, escape)
    return encoded


def event(content: Any) -> bytes:
    return b"data: " + one_line(content) + b"\n\n"


def named_event(name: str, content: Any) -> bytes:
    return b"event: " + name.encode() + b"\n" + event(content)


@contextmanager
def cancelled_with_client(job: Job, receive: Callable[[], Awaitable[Message]]) -> Iterator[None]:
    """Inside this context a disconnect of the client cancels the job. The body must have been read
    before."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        job.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()


class FollowingStream(Response):
    """Sends chunks about something that goes on without its client, until they end or the client
    goes away. Empty chunks are left out."""

    def __init__(self, chunks: AsyncGenerator[bytes, None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        watching = asyncio.create_task(watch())
        sending = asyncio.create_task(self._send(send))
        try:
            await asyncio.wait([watching, sending], return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            for task in (watching, sending):
                task.cancel()
            await asyncio.gather(watching, sending, return_exceptions=True)
            await self._chunks.aclose()

    async def _send(self, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        async for chunk in self._chunks:
            if chunk:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class EventStream(Response):
    """Sends ``chunks``, then the result of ``end``, whose argument is the refusal that cut the
    stream short, if any. Chunks that come without a wait between them leave in one write: a write
    costs as much as all other work on a token. After a long write it waits until the client has
    taken most of it, so that what comes meanwhile is made into as few chunks as possible. It owns
    the job, which always ends with the response. An error before the first chunk is raised, so that
    it gets its own HTTP status; a later one becomes the last chunk.
    """

    def __init__(
        self,
        job: Job,
        chunks: AsyncGenerator[bytes, None],
        end: Callable[[Refusal | None], bytes],
        *,
        media_type: str = "text/event-stream",
    ) -> None:
        super().__init__(media_type=media_type, headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._job = job
        self._chunks = chunks
        self._end = end
        self._gathered: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._job, cancelled_with_client(self._job, receive):
            try:
                self._gathered.append(await anext(self._chunks))
                await send(
                    {
                        "type": "http.response.start",
                        "status": self.status_code,
                        "headers": self.raw_headers,
                    }
                )
                self._job.before_wait = lambda: self._write(send)
                refusal = await self._gather_rest()
                if refusal is not None:
                    scope[IN_SCOPE].refusal = refusal.message
                self._gathered.append(self._end(refusal))
                await self._write(send, more=False)
            finally:
                await self._chunks.aclose()

    async def _gather_rest(self) -> Refusal | None:
        """Runs to the end of the chunks; ``before_wait`` sends them."""
        try:
            async for chunk in self._chunks:
                self._gathered.append(chunk)
        except ClientGoneError:
            logger.debug("A client left in mid-stream.")
        except SetpointError as error:
            return refusal_of(error)
        return None

    async def _write(self, send: Send, *, more: bool = True) -> None:
        if self._gathered or not more:
            body = b"".join(self._gathered)
            self._gathered.clear()
            await send({"type": "http.response.body", "body": body, "more_body": more})
            if more and len(body) >= LONG_WRITE:
                await asyncio.sleep(0)
                # The server waits for a slow client before it writes, not after that.
                await send({"type": "http.response.body", "body": b"", "more_body": True})
