"""The link between the frontend and the engine process: two connected Unix sockets, and the
engine's end of them.

Carries the messages of ``core.messages`` as bytes, each after its length, never pickle. Neither
side ever waits for the other: bytes that the kernel does not take at once are kept until it does.
The link has no thread, so on cores that compute, a message wakes only its reader (decision 0022).
The frontend's end, on an asyncio loop, is ``ipc/link.py``.
"""

from __future__ import annotations

import logging
import os
import select
import socket
from collections import deque
from contextlib import suppress

import msgspec

from setpoint.core.errors import RequestError
from setpoint.core.framing import Unpacker, framed
from setpoint.core.messages import (
    Posted,
    Shutdown,
    ToFrontend,
    ToLoop,
    decode_to_engine,
    encode,
)

logger = logging.getLogger(__name__)

_CHUNK = 1 << 18


class MessageSocket:
    """Sends and receives whole messages on one end of a stream socket. For one thread; nothing here
    blocks."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._unsent = bytearray()
        self._unpacker = Unpacker()
        self.is_cut = False
        """Whether the other end is gone, so nothing more comes. Written by ``receive``."""

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether bytes wait for room in the kernel's buffer; if so, call ``flush`` when the socket
        becomes writable."""
        return bool(self._unsent)

    def send(self, data: bytes) -> None:
        """Send a message. It is lost if the other end goes away before it reads it."""
        self._unsent += framed(data)
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

    def receive(self, most_bytes: int | None = None) -> list[bytes]:
        """All messages that have arrived, possibly none; with ``most_bytes``, only those that are
        whole when so many more bytes are read."""
        messages: list[bytes] = []
        while not self.is_cut:
            try:
                chunk = self._socket.recv(most_bytes or _CHUNK)
            except BlockingIOError:
                break
            except ConnectionResetError:
                chunk = b""
            messages += self._unpacker.feed(chunk)
            self.is_cut = not chunk
            if most_bytes is not None or len(chunk) < _CHUNK:
                break
        return messages

    def close(self) -> None:
        self._socket.close()


class EngineSocket:
    """The engine's end, which is the inbox of the scheduler's loop: only the loop's thread uses it,
    except for ``post``."""

    def __init__(self, descriptor: int, bell: int | None = None) -> None:
        """descriptor: a connected socket's, which this object owns from now on. bell: an eventfd's
        with which other engines wake the loop up."""
        self._bell = bell
        self._messages = MessageSocket(socket.socket(fileno=descriptor))
        self._posted: deque[Posted] = deque()
        self._wake, self._woken = socket.socketpair()
        """The second socket is readable from a ``post`` until the next ``receive``."""
        self._wake.setblocking(False)

    def post(self, message: Posted) -> None:
        """Wake the loop up with a message for its inbox; may be called from any thread of this
        process."""
        self._posted.append(message)
        with suppress(
            OSError
        ):  # full: the loop will wake up anyway; closed: there is no loop to wake up
            self._wake.send(b"\0")

    def receive(self, timeout_s: float = 0.0) -> list[ToLoop]:
        """All messages that have arrived; if there are none, waits up to ``timeout_s`` for the
        first. If the frontend is gone, the result ends with Shutdown. A malformed message is logged
        and dropped.
        """
        ready = self._wait(timeout_s)
        if not ready:
            return []
        messages: list[ToLoop] = []
        if self._bell is not None and self._bell in ready:
            os.eventfd_read(self._bell)
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
        """Send a message without blocking: bytes that the kernel does not take yet are queued
        here."""
        self._messages.send(encode(message))

    def close(self) -> None:
        self._messages.close()
        self._wake.close()
        self._woken.close()

    def _wait(self, timeout_s: float) -> list[int]:
        """Wait for a message, or for room to send what is queued; returns the descriptors that are
        ready, if any."""
        poller = select.poll()
        poller.register(
            self._messages, select.POLLIN | (select.POLLOUT if self._messages.has_unsent else 0)
        )
        poller.register(self._woken, select.POLLIN)
        if self._bell is not None:
            poller.register(self._bell, select.POLLIN)
        return [descriptor for descriptor, _ in poller.poll(timeout_s * 1000)]
