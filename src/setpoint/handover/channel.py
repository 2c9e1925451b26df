"""One connection between a prefill and a decode server, from either side: frames in both
directions, and a watch that ends it when the peer has been silent for too long."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from setpoint.handover.frames import (
    HEADER,
    MAX_MESSAGE,
    HandoverError,
    Message,
    Ping,
    decode,
    encode,
    size_of,
)

PING_S = 0.2
"""Each side sends something at least so often."""
SILENCE_S = 0.9
"""How long a peer may be silent."""
GREETING_S = 5.0
"""How long a handshake may take."""
SOCKET_BYTES = 4 << 20
OTHER_WEIGHTS = "the engine has got other weights"
PEER_GONE = "the peer has closed the connection"
PEER_SILENT = f"the peer has been silent for {SILENCE_S} s"


class Channel:
    """A connection on which tasks of one event loop send and receive frames."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        self._sending = asyncio.Lock()
        self._heard_at = self._loop.time()
        self._header = bytearray(HEADER.size)
        self.failure = ""
        """Why the connection has ended, once it has."""

    async def send(self, message: Message, payload: memoryview | None = None) -> None:
        """Raises HandoverError if the connection ends."""
        data = encode(message)
        try:
            async with self._sending:
                await self._loop.sock_sendall(self._socket, data)
                if payload is not None:
                    await self._loop.sock_sendall(self._socket, payload)
        except (OSError, ValueError):
            raise self._ended(PEER_GONE) from None

    async def receive(self, most: int = MAX_MESSAGE) -> Message:
        """The next message. Raises HandoverError if the connection ends, or carries anything
        else."""
        await self.receive_into(memoryview(self._header))
        data = bytearray(size_of(bytes(self._header), most))
        await self.receive_into(memoryview(data))
        return decode(data)

    async def receive_into(self, view: memoryview) -> None:
        """Fill the view with the next bytes. Raises HandoverError if the connection ends."""
        begin = 0
        while begin < len(view):
            try:
                count = await self._loop.sock_recv_into(self._socket, view[begin:])
            except (OSError, ValueError):
                count = 0
            if not count:
                raise self._ended(PEER_GONE)
            begin += count
            self._heard_at = self._loop.time()

    async def run(self, *works: Coroutine[Any, Any, None]) -> str:
        """Do several things, and watch the peer, until the connection ends or one of them fails;
        returns why. Raises what is not the connection's fault."""
        tasks = [asyncio.ensure_future(each) for each in (self.watch(), *works)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            failed = [each.exception() for each in tasks if each.done()]
            self.end(next((str(each) for each in failed if each is not None), "it has ended"))
        finally:
            self.end("this server ends")
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        for each in ends:
            if isinstance(each, Exception) and not isinstance(each, HandoverError):
                raise each
        return self.failure

    async def watch(self) -> None:
        """Send signs of life until the connection ends or the peer is silent."""
        try:
            while not self.failure:
                before = self._loop.time()
                await asyncio.sleep(PING_S)
                now = self._loop.time()
                if now - before > 2 * PING_S:
                    self._heard_at = now  # this process has been held up, not the peer
                if now - self._heard_at > SILENCE_S:
                    self.end(PEER_SILENT)
                elif not self._sending.locked():
                    await self.send(Ping())
        except HandoverError:
            pass

    def end(self, reason: str) -> None:
        """Close the connection, which makes pending calls raise HandoverError."""
        self._ended(reason)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _ended(self, reason: str) -> HandoverError:
        self.failure = self.failure or reason
        return HandoverError(self.failure)
