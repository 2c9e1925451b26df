"""A client that sends one HTTP request per connection and reads with httptools' parser, to spend as
little time as possible per token of a stream.

Works on bytes: a body, or the data of server-sent events as they arrive. It does not interpret them
(decision 0014).
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import httptools

from setpoint.core.errors import ConfigError

CONNECT_S = 30.0

OnEvent = Callable[[bytes, float], None]
"""Called with the data of an event and the time when it arrived."""


class ExchangeError(Exception):
    """No complete answer arrived. The message gives the reason in words that do not differ between
    requests."""


@dataclass(slots=True, frozen=True)
class HttpResponse:
    status: int
    body: bytes
    """The bytes that were not passed on as events."""


class HttpTarget:
    """The server that requests go to. Contract: the caller's ``on_event`` never raises."""

    def __init__(self, base_url: str, *, api_key: str | None = None) -> None:
        """Raises ConfigError if ``base_url`` is not an HTTP address."""
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigError(f"--base-url must look like http://HOST:PORT, got {base_url!r}.")
        self.url = base_url.rstrip("/")
        self._host = url.hostname
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._port = url.port or (443 if self._tls else 80)
        self._prefix = url.path.rstrip("/").removesuffix("/v1")
        self._head = (
            f"Host: {url.netloc.rpartition('@')[2]}\r\nConnection: close\r\nContent-Type:"
            " application/json\r\n"
        )
        if api_key:
            self._head += f"Authorization: Bearer {api_key}\r\n"

    async def post(
        self, path: str, body: bytes, *, on_event: OnEvent | None = None, stall_s: float
    ) -> HttpResponse:
        """Send a POST request and return the response, whatever its status. ``on_event`` gets the
        events of a stream with status 200. Raises ExchangeError."""
        return await self._exchange("POST", path, body, on_event, stall_s)

    async def get(self, path: str, *, stall_s: float) -> HttpResponse:
        """Send a GET request and return the response. Raises ExchangeError."""
        return await self._exchange("GET", path, b"", None, stall_s)

    async def _exchange(
        self, method: str, path: str, body: bytes, on_event: OnEvent | None, stall_s: float
    ) -> HttpResponse:
        loop = asyncio.get_running_loop()
        head = (
            f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._head}Content-Length:"
            f" {len(body)}\r\n\r\n"
        )
        try:
            async with asyncio.timeout(min(CONNECT_S, stall_s)):
                transport, protocol = await loop.create_connection(
                    lambda: _Protocol(loop.create_future(), on_event),
                    self._host,
                    self._port,
                    ssl=self._tls,
                )
        except TimeoutError:
            raise ExchangeError("timed out while connecting") from None
        except OSError as error:
            raise ExchangeError(
                f"no connection ({error.strerror or type(error).__name__})"
            ) from None
        try:
            transport.write(head.encode() + body)
            return await protocol.wait(stall_s)
        finally:
            transport.abort()


class _Protocol(asyncio.Protocol):
    """Reads one response."""

    def __init__(self, done: asyncio.Future[HttpResponse], on_event: OnEvent | None) -> None:
        self._done = done
        self._on_event = on_event
        self._parser = httptools.HttpResponseParser(self)
        self._now = time.perf_counter()
        self._status = 0
        self._is_stream = False
        self._has_length = False
        self._rest = b""
        self._body = bytearray()

    async def wait(self, stall_s: float) -> HttpResponse:
        """Wait for the end of the response. Raises ExchangeError."""
        while not self._done.done():
            left = self._now + stall_s - time.perf_counter()
            if left <= 0:
                raise ExchangeError(f"nothing received for {stall_s:g} s")
            await asyncio.wait([self._done], timeout=left)
        return self._done.result()

    # -- callbacks of asyncio

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail("the answer is not HTTP")

    def connection_lost(self, error: Exception | None) -> None:
        if self._status and not self._has_length and error is None:
            self.on_message_complete()  # a body that ends with the connection
        self._fail("the connection broke")

    # -- callbacks of the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self._is_stream = value.lower().startswith(b"text/event-stream")
        elif name in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if not self._is_stream or self._on_event is None or self._status != 200:
            self._body += data
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._on_event(line[5:].strip(), self._now)

    def on_message_complete(self) -> None:
        if not self._done.done():
            self._done.set_result(HttpResponse(self._status, bytes(self._body)))

    def _fail(self, reason: str) -> None:
        if not self._done.done():
            self._done.set_exception(ExchangeError(reason))
            self._done.exception()  # nobody may be waiting any more
