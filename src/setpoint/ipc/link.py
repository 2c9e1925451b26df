"""The frontend's end of the link to the engine process, inside an asyncio loop.

Carries bytes both ways; the EngineLine interprets them. It reads the socket from the loop's own
reader callback instead of through futures: one wake-up takes what has arrived, up to a limit.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from setpoint.ipc.sockets import MessageSocket

PER_TURN = 1 << 15
"""Bytes of messages that are taken in one turn of the loop: a token of 200 streams with 10
logprobs, some milliseconds. A frontend that is behind finds far more, and other work needs
turns."""


class SocketLink:
    """An EngineLink over one end of a socket pair. ``start`` is called inside the running loop,
    ``close`` when it ends."""

    def __init__(self, sock: socket.socket) -> None:
        self._messages = MessageSocket(sock)
        self._receiver: Callable[[bytes], None] | None = None

    def start(self, receiver: Callable[[bytes], None], on_cut: Callable[[], None]) -> None:
        self._receiver = receiver
        self._on_cut = on_cut
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._messages.fileno(), self._drain)

    def send(self, data: bytes) -> None:
        self._messages.send(data)
        if self._messages.has_unsent:
            self._loop.add_writer(self._messages.fileno(), self._flush)

    def close(self) -> None:
        if self._receiver is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._messages.fileno())
            self._loop.remove_writer(self._messages.fileno())
        self._receiver = None
        self._messages.close()

    def _flush(self) -> None:
        self._messages.flush()
        if not self._messages.has_unsent:
            self._loop.remove_writer(self._messages.fileno())

    def _drain(self) -> None:
        # The loop calls again as long as there is more.
        for data in self._messages.receive(PER_TURN):
            if self._receiver is not None:
                self._receiver(data)
        if self._messages.is_cut and self._receiver is not None:
            self._loop.remove_reader(self._messages.fileno())
            self._on_cut()
