"""Decodes request bodies that a client has compressed; ASGI middleware.

The decoded bytes are passed on piece by piece, as the reader of the body asks for them, so that the
reader's own limit also ends a small body that would become a huge one.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import zstandard
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from setpoint.core.errors import RequestError
from setpoint.core.excerpt import quoted
from setpoint.frontend.http.dialect import Dialects
from setpoint.frontend.http.error_responses import error_response
from setpoint.frontend.refusal import Refusal, refusal_of

SLICE_BYTES = 256
"""How much is decoded at a time. A block of zstd may hold 128 KiB in 4 bytes, so that a slice
becomes at most 8 MiB."""
_PIECE_BYTES = 1 << 16
"""The pieces that are passed on have about this size; other requests go on between two of them."""
_ZSTD_WINDOW_BYTES = 8 << 20
"""Most memory of a decoder, as RFC 9659 limits this encoding of HTTP."""


class _Decoder(Protocol):
    """What zlib and zstandard have in common."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


class _Deflate:
    """``deflate``, which clients send with zlib's header, as RFC 9110 says, or without."""

    def __init__(self) -> None:
        self._inner: Any = None

    @property
    def eof(self) -> bool:
        return self._inner is not None and self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return b"" if self._inner is None else self._inner.unused_data

    def decompress(self, data: bytes) -> bytes:
        if self._inner is None:
            # The low half of zlib's first byte is its method, 8; no raw stream that a compressor
            # writes begins so.
            has_header = data[0] & 15 == 8
            self._inner = zlib.decompressobj(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)
        decoded: bytes = self._inner.decompress(data)
        return decoded


def _zstd() -> Any:
    return zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES).decompressobj()


_DECODERS: Mapping[str, Callable[[], Any]] = {
    "gzip": lambda: zlib.decompressobj(zlib.MAX_WBITS + 16),
    "x-gzip": lambda: zlib.decompressobj(zlib.MAX_WBITS + 16),
    "deflate": _Deflate,
    "zstd": _zstd,
}
ACCEPTED = "gzip, deflate, zstd"


class ContentEncodingMiddleware:
    def __init__(self, app: ASGIApp, *, dialects: Dialects) -> None:
        self._app = app
        self._dialects = dialects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = _encoding(scope) if scope["type"] == "http" else ""
        if name in ("", "identity"):
            await self._app(scope, receive, send)
            return
        refusal = None if name in _DECODERS else _unknown(name)
        if refusal is None:
            try:
                await self._app(scope, _Body(name, receive).receive, send)
            except RequestError as error:  # read by a middleware, which has no handler of errors
                refusal = refusal_of(error)
        if refusal is not None:
            response = error_response(self._dialects, scope, refusal)
            response.headers["accept-encoding"] = ACCEPTED
            await response(scope, receive, send)


def _encoding(scope: Scope) -> str:
    """The encoding of a body; several in one text if it is encoded more than once, which no client
    does and would multiply what a byte may become."""
    return ",".join(Headers(scope=scope).getlist("content-encoding")).strip().lower()


def _unknown(name: str) -> Refusal:
    accepted = " or ".join(ACCEPTED.rsplit(", ", 1))
    message = (
        f"The content encoding {quoted(name, 64)} is not supported. Send the body as it is, or"
        f" encoded with {accepted}."
    )
    return Refusal(message=message, status_code=415)


class _Body:
    """One request's body, decoded as it is received. It may consist of several encoded streams, one
    after the other."""

    def __init__(self, name: str, receive: Receive) -> None:
        self._name = name
        self._receive = receive
        self._slices: deque[bytes] = deque()
        """What has arrived and is not decoded yet."""
        self._is_whole = False
        """Whether all of it has arrived."""
        self._is_over = False
        """Whether all of it has been passed on."""
        self._decoder: _Decoder | None = None

    async def receive(self) -> Message:
        """Like ASGI's ``receive``. Raises RequestError (400) for a body that is not in its
        encoding, or not whole."""
        if self._is_over:
            return await self._receive()  # what follows a body: the client leaves
        decoded = bytearray()
        while len(decoded) < _PIECE_BYTES:
            if self._slices:
                decoded += self._decoded(self._slices.popleft())
                continue
            if self._is_whole:
                if self._decoder is not None:
                    raise RequestError(f"The body ends before its {self._name} encoding does.")
                self._is_over = True
                return {"type": "http.request", "body": bytes(decoded), "more_body": False}
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            body = message.get("body", b"")
            starts = range(0, len(body), SLICE_BYTES)
            self._slices.extend(body[start : start + SLICE_BYTES] for start in starts)
            self._is_whole = not message.get("more_body", False)
        await asyncio.sleep(0)
        return {"type": "http.request", "body": bytes(decoded), "more_body": True}

    def _decoded(self, data: bytes) -> bytes:
        decoded = b""
        try:
            while data:
                if self._decoder is None:
                    self._decoder = _DECODERS[self._name]()
                decoded += self._decoder.decompress(data)
                data = self._decoder.unused_data
                if self._decoder.eof:
                    self._decoder = None
        except (zlib.error, zstandard.ZstdError) as error:
            raise RequestError(f"The body is not valid {self._name}: {error}.") from None
        return decoded
