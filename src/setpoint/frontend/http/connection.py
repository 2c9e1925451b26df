"""One HTTP connection: uvicorn's, over httptools, with what that lacks. A request must arrive in
time and its head must be short, or slow and endless requests would pile up. An answer to HTTP/1.0
has no chunks, because that version does not know them. Works on bytes and uvicorn's bookkeeping
(``cycle``: one request and its response), below ASGI.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any, Protocol

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from setpoint.core.awake import CLOCK
from setpoint.frontend.arrival import ARRIVED_AT, IN_SCOPE, Arrival
from setpoint.frontend.drain import Drain
from setpoint.frontend.http.access import log_access
from setpoint.frontend.http.crowd import Crowd
from setpoint.frontend.http.pace import TurnLimiter, Urgency
from setpoint.frontend.refusal import Refusal
from setpoint.frontend.unread import Unread

MAX_HEAD_BYTES = 64 << 10
"""Most bytes in a request line with its headers."""
RECEIVE_S = 20.0
"""How long a request may take to arrive; a new connection has the same time to begin one."""
RECEIVE_RATE = 4096
"""The rate in bytes per second at which a long request must arrive: each byte extends its time
accordingly."""
UNREAD_S = 60.0
"""How often a client that has to read is looked at. One that meanwhile took neither all that waited
for it nor READ_RATE bytes per second of it has stopped reading, and its connection is closed."""
READ_RATE = 1024
LINGER_S = 5.0
"""How long a client that is still sending has to read a refusal. A connection closed at once would
be reset, and the refusal lost."""
CUT = "setpoint.cut"
"""The ASGI extension that closes the connection at once, even while a write waits for a client that
does not read."""


class Errors(Protocol):
    """The shape of a port's errors."""

    def error_body(self, path: str, refusal: Refusal) -> Any:
        """The body of the answer to a request refused at ``path``, for JSON."""


class HeadTooLongError(Exception):
    """The head of a request has arrived, and is longer than MAX_HEAD_BYTES."""


class Connection(HttpToolsProtocol):
    receive_s = RECEIVE_S
    unread_s = UNREAD_S

    def __init__(
        self,
        *,
        errors: Errors,
        pace: TurnLimiter,
        drain: Drain,
        crowd: Crowd,
        unread: Unread,
        **kwargs: Any,
    ) -> None:
        """errors: shape the refusals of input that never becomes a request. pace: begins the work
        on requests. drain: tells whether the server is ending. crowd: the port's connections.
        unread: counts the answers that clients do not read. The others are uvicorn's."""
        super().__init__(**kwargs)
        self._errors = errors
        self._pace = pace
        self._drain = drain
        self._crowd = crowd
        self._unread = unread
        self._unread_timer: asyncio.TimerHandle | None = None
        self._num_unread = 0
        """Bytes that waited for the client when it was last looked at."""
        self.access_log = False  # AccessLogMiddleware writes it, when the answer has ended

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._is_refused = False
        self._is_over = False
        """Whether the last answer was sent before its request had arrived; the rest of that request
        is dropped."""
        self._timer: asyncio.TimerHandle | None = None
        self._expect_head()
        self._crowd.enter(self)

    @property
    def can_end(self) -> bool:
        """Whether no request has arrived that waits for its answer."""
        return self.cycle is None or self.cycle.more_body or self.cycle.response_complete

    def cut(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._crowd.leave(self)
        self._stop_timer()
        self._was_read()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._was_read()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._expect_reader()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return  # read and dropped until the client has read the refusal
        super().data_received(data)
        self._num_received += len(data)
        if self._in_head and self._num_received > MAX_HEAD_BYTES and not self._is_refused:
            self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {CUT: {"now": self.transport.abort}}
        self._expect_head()

    def on_headers_complete(self) -> None:
        # A head in one piece is never seen unfinished. What raises here ends the parser's work.
        line = len(self.parser.get_method()) + len(self.url) + len("  HTTP/1.1\r\n\r\n")
        size = line + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > MAX_HEAD_BYTES:
            self._num_received = size
            raise HeadTooLongError
        self._in_head = False
        self.scope[ARRIVED_AT] = time.perf_counter()  # type: ignore[literal-required]
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._stop_timer()
        super().on_message_complete()
        if self._is_over:
            self.transport.close()
        # answered before the request's end: later data has stopped the timer of the idle connection
        elif self.cycle.response_complete:
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def send_400_response(self, msg: str) -> None:
        if self._in_head and self._num_received > MAX_HEAD_BYTES:
            self._refuse_head()
        else:
            self._refuse(400, "The request is not valid HTTP.")

    def _refuse_head(self) -> None:
        self._refuse(431, f"The request line and headers are longer than {MAX_HEAD_BYTES} bytes.")

    def shutdown(self) -> None:
        """End the connection with the server. A request that has not arrived by now is not waited
        for."""
        if self.cycle is not None and self.cycle.more_body and not self.cycle.response_started:
            self.transport.close()
        else:
            super().shutdown()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self._drain.is_on:  # the client should find another server behind the same address
            app = _closing(app)
        wrapped = app if cycle.keep_alive else self._ending(app, cycle)
        start = partial(super()._start_asgi_task, cycle, wrapped)
        if self._pace.can_wait(cycle.scope["method"], cycle.scope["path"]):
            self._pace.call(start, Urgency.REQUEST)
        else:
            start()

    def _ending(self, app: ASGIApp, cycle: RequestResponseCycle) -> Any:
        """Wrap ``app`` so that its answer is the last of this connection. For HTTP/1.0, the end of
        the connection ends an answer of unknown length."""

        async def answering(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_last(message: Message) -> None:
                if message["type"] == "http.response.start":
                    if scope["http_version"] == "1.0" and not any(
                        name.lower() == b"content-length" for name, _ in message["headers"]
                    ):
                        cycle.chunked_encoding = False
                elif cycle.chunked_encoding is False and scope["http_version"] == "1.0":
                    cycle.expected_content_length = len(message.get("body", b""))
                self._is_over = (
                    not message.get("more_body", False)
                    and cycle.more_body
                    and cycle.response_started
                )
                if self._is_over:
                    # uvicorn would close at once: the connection ends with the request
                    # (on_message_complete)
                    cycle.keep_alive = True
                await send(message)
                if self._is_over:
                    self.transport.write_eof()

            await app(scope, receive, send_last)

        return answering

    def _expect_head(self) -> None:
        self._in_head = True
        self._num_received = 0
        self._since = CLOCK.now()
        self._began_at = time.perf_counter()
        if self._timer is None:
            self._timer = self.loop.call_later(self.receive_s, self._look)

    def _look(self) -> None:
        """Refuse a request whose time is up, unless the bytes that have arrived have extended its
        time."""
        if self.transport.is_closing():
            return
        if self.flow.read_paused:  # the client waits for this server
            self._since = CLOCK.now()
        left = self._since + self.receive_s + self._num_received / RECEIVE_RATE - CLOCK.now()
        if left > 0:
            self._timer = self.loop.call_later(left, self._look)
        elif self._num_received and (self._in_head or not self.cycle.response_complete):
            self._refuse(
                408,
                f"The request did not arrive within {self.receive_s:g} s and {RECEIVE_RATE} bytes"
                " per second.",
            )
        else:
            self.transport.close()

    def _expect_reader(self) -> None:
        """Watch whether the client reads what waits for it."""
        if self._unread_timer is not None:
            self._unread_timer.cancel()
        self._unread.waiting[self] = self.transport.get_write_buffer_size
        self._num_unread = self.transport.get_write_buffer_size()
        self._unread_timer = self.loop.call_later(self.unread_s, self._look_at_reader)

    def _look_at_reader(self) -> None:
        size = self.transport.get_write_buffer_size()
        if size == 0:
            self._was_read()
        elif self._num_unread - size >= self.unread_s * READ_RATE:
            self._expect_reader()
        else:
            self._unread.close(self, self.unread_s)
            came = self.scope.get(IN_SCOPE)
            if isinstance(came, Arrival):
                came.refusal = f"The client has not read its answer for {self.unread_s:g} s."
            self.transport.abort()

    def _was_read(self) -> None:
        self._unread.waiting.pop(self, None)
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status_code: int, message: str) -> None:
        """Refuse a request of which only a part has arrived, and read no more of it."""
        self._stop_timer()
        self._unset_keepalive_if_required()
        self._is_refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            if self.cycle.response_started or not self.cycle.more_body:
                # in the middle of an answer no other can be sent
                self.transport.close()
                return
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        refusal = Refusal(message=message, status_code=status_code)
        # Its path may not have arrived yet, or may have an invalid encoding.
        path = self.url.partition(b"?")[0].decode("latin-1")
        body = msgspec.json.encode(self._errors.error_body(path, refusal))
        head = (
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection:"
            " close\r\n\r\n"
        )
        self.transport.write(STATUS_LINE[status_code] + head.encode() + body)
        self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER_S, self.transport.close)
        unknown = {"method": "?", "path": path, "query_string": b"", "http_version": "?"}
        scope = unknown | {"client": self.client} | dict(self.scope or {})
        log_access(scope, status_code, Arrival(self._began_at, refusal=message))


def _closing(app: ASGIApp) -> ASGIApp:
    """Wrap ``app`` so that the client is told that its answer is the last of the connection."""

    async def answering(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        await app(scope, receive, send_last)

    return answering
