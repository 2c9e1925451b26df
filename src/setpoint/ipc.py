"""The link between the frontend and the engine process: two connected Unix sockets, and the
engine's end of them.

Carries the messages of ``core.messages`` as bytes, each behind its length, never pickle. No side
ever waits for the other: what the kernel does not take at once is kept until it does. No thread
works for the link: a message wakes its reader and nobody else, on cores that compute (decision
0022). The frontend's end, which lives in an asyncio loop, is ``frontend/ipc/link.py``.
"""

from __future__ import annotations

import logging
import select
import socket
import struct
from collections import deque
from contextlib import suppress

import msgspec

from setpoint.core.errors import RequestError
from setpoint.core.messages import (
    Prepared,
    Shutdown,
    ToFrontend,
    ToLoop,
    decode_to_engine,
    encode,
)

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")
_CHUNK = 1 << 18


class MessageSocket:
    """One end of a stream socket, as whole messages. For one thread; nothing here blocks."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._unsent = bytearray()
        self._received = bytearray()
        self.is_cut = False
        """The other end is gone: nothing more comes. Written by ``receive``."""

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether something waits for room in the kernel's buffer: ``flush`` when the socket
        becomes writable."""
        return bool(self._unsent)

    def send(self, data: bytes) -> None:
        """What the other end does not live to read is lost."""
        self._unsent += _LENGTH.pack(len(data))
        self._unsent += data
        self.flush()

    def flush(self) -> None:
        while self._unsent:
            try:
                num_sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                num_sent = len(self._unsent)
            del self._unsent[:num_sent]

    def receive(self) -> list[bytes]:
        """The messages that are here, which may be none."""
        while not self.is_cut:
            try:
                chunk = self._socket.recv(_CHUNK)
            except BlockingIOError:
                break
            except ConnectionResetError:
                chunk = b""
            self._received += chunk
            self.is_cut = not chunk
            if len(chunk) < _CHUNK:
                break
        return self._take_whole()

    def close(self) -> None:
        self._socket.close()

    def _take_whole(self) -> list[bytes]:
        messages: list[bytes] = []
        begin, buffer = 0, self._received
        while len(buffer) >= begin + _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, begin)
            end = begin + _LENGTH.size + length
            if end > len(buffer):
                break
            messages.append(bytes(buffer[begin + _LENGTH.size : end]))
            begin = end
        del buffer[:begin]
        return messages


class EngineSocket:
    """The engine's end: used by one thread, the scheduler's loop, whose inbox it is. Only ``post``
    is for other threads."""

    def __init__(self, descriptor: int) -> None:
        """``descriptor``: of a connected socket, which is ours from now on."""
        self._messages = MessageSocket(socket.socket(fileno=descriptor))
        self._posted: deque[Prepared] = deque()
        self._wake, self._woken = socket.socketpair()
        """The second is readable from a ``post`` until the next ``receive``."""
        self._wake.setblocking(False)

    def post(self, message: Prepared) -> None:
        """From any thread of this process: the loop receives it, and wakes up for it."""
        self._posted.append(message)
        with suppress(OSError):  # full: it will wake up; closed: nobody is left to wake up
            self._wake.send(b"\0")

    def receive(self, timeout_s: float = 0.0) -> list[ToLoop]:
        """All messages that are here. With none, waits up to ``timeout_s`` for the first. A
        frontend that is gone says Shutdown.

        A malformed message is logged and dropped.
        """
        ready = self._wait(timeout_s)
        if not ready:
            return []
        messages: list[ToLoop] = []
        if self._woken.fileno() in ready:
            self._woken.recv(_CHUNK)
            while self._posted:
                messages.append(self._posted.popleft())
        self._messages.flush()
        for data in self._messages.receive():
            try:
                messages.append(decode_to_engine(data))
            except (msgspec.DecodeError, UnicodeDecodeError, RequestError) as error:
                logger.error(
                    "Dropped a malformed message of %d bytes from the frontend: %s",
                    len(data),
                    error,
                )
        if self._messages.is_cut:
            messages.append(Shutdown())
        return messages

    def send(self, message: ToFrontend) -> None:
        """Never blocks: what the frontend has not read yet is queued here."""
        self._messages.send(encode(message))

    def close(self) -> None:
        self._messages.close()
        self._wake.close()
        self._woken.close()

    def _wait(self, timeout_s: float) -> list[int]:
        """For a message, or for room to send what waits; the descriptors that are ready, if any
        are."""
        poller = select.poll()
        poller.register(
            self._messages, select.POLLIN | (select.POLLOUT if self._messages.has_unsent else 0)
        )
        poller.register(self._woken, select.POLLIN)
        return [descriptor for descriptor, _ in poller.poll(timeout_s * 1000)]
