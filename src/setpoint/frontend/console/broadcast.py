"""Sends the same events to many viewers. An event is encoded once for all of them, and a viewer who
reads too slowly is dropped instead of being waited or kept for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from setpoint.frontend.http.connection import CUT

MAX_BEHIND_BYTES = 1 << 20
"""Most bytes that wait for a viewer: half a minute of a busy server."""


class Viewer:
    """The events on their way to one viewer."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._num_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._is_over = False
        self.cut: Callable[[], None] = lambda: None
        """Closes the connection of a viewer who reads too slowly: a write that waits for it would
        wait as long as the connection is there."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be sent, what waits included."""
        return self._is_over

    def put(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._num_bytes += len(chunk)
        if self._num_bytes > MAX_BEHIND_BYTES:
            self.end()
            self.cut()
        self._wake()

    def end(self) -> None:
        self._is_over = True
        self._chunks.clear()
        self._wake()

    async def take(self) -> bytes:
        """Wait for events; all that are there. b"" at the end."""
        while not self._chunks and not self._is_over:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        taken = b"".join(self._chunks)
        self._chunks.clear()
        self._num_bytes = 0
        return taken

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Broadcast:
    def __init__(self) -> None:
        self._viewers: set[Viewer] = set()

    def __len__(self) -> int:
        return len(self._viewers)

    def join(self, *first: bytes) -> Viewer:
        """A viewer who gets ``first``, and then all that is published."""
        viewer = Viewer()
        viewer.put(b"".join(first))
        self._viewers.add(viewer)
        return viewer

    def leave(self, viewer: Viewer) -> None:
        self._viewers.discard(viewer)

    def publish(self, chunk: bytes) -> None:
        for viewer in [*self._viewers]:
            viewer.put(chunk)
            if viewer.is_over:
                self._viewers.discard(viewer)

    def end(self) -> None:
        """End every viewer's stream."""
        for viewer in self._viewers:
            viewer.end()
        self._viewers.clear()


class ViewerStream(Response):
    """The response that a viewer reads, until it leaves or its stream is ended."""

    def __init__(self, broadcast: Broadcast, viewer: Viewer) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-store"})
        del self.headers["content-length"]
        self._broadcast = broadcast
        self._viewer = viewer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self._viewer.end()

        if CUT in scope.get("extensions", {}):
            self._viewer.cut = scope["extensions"][CUT]["now"]
        watcher = asyncio.create_task(watch())
        try:
            start = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **start})
            while chunk := await self._viewer.take():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            watcher.cancel()
            self._broadcast.leave(self._viewer)
