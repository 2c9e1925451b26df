"""The frontend's end of the ZeroMQ link, inside an asyncio loop.

Carries bytes both ways; what they mean is the EngineClient's business. It reads the socket from the loop's own reader
callback instead of through futures: one wake-up drains everything that arrived.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

from setpoint.ipc import Endpoints, open_pull, open_push


class SocketLink:
    """An EngineLink over two ipc sockets. ``start`` is called inside the running loop, ``close`` when it ends."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pull = open_pull(self._context, endpoints.to_frontend)
        self._descriptor = int(self._pull.getsockopt(zmq.FD))
        self._push = open_push(self._context, endpoints.to_engine)
        self._receiver: Callable[[bytes], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, receiver: Callable[[bytes], None]) -> None:
        self._receiver = receiver
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._drain)
        # ZeroMQ's descriptor signals changes only: what arrived before the reader was added gives no event.
        self._loop.call_soon(self._drain)

    def send(self, data: bytes) -> None:
        self._push.send(data, zmq.NOBLOCK)

    def close(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._descriptor)
        self._receiver = None
        self._pull.close()
        self._push.close(linger=0)
        self._context.term()

    def _drain(self) -> None:
        while self._receiver is not None:
            try:
                data = self._pull.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._receiver(data)
