"""Writes the log to a descriptor without ever waiting long for whoever reads it.

A process that reads the log may stop to read, and then its pipe fills up. A server that waited for
it would answer nobody, and could not even be ended by a signal. So lines that find no room are
dropped, and their number is written as soon as there is room again.
"""

from __future__ import annotations

import os
import select
import socket
import stat
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

WAIT_S = 0.1
"""How long a line may wait for room, if the line before it was written."""
DROPPED = "... {} lines of the log were dropped here, because nobody read them in time.\n"


class LogStream:
    """The stream of a logging handler. Each call of ``write`` is whole lines. They are written
    whole or, if the reader stops within one, not to their end."""

    def __init__(self, descriptor: int) -> None:
        self._send, self._close = _sender(descriptor)
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        self.num_dropped = 0
        """Lines that were dropped since the last one was written."""

    def write(self, text: str) -> None:
        if self.num_dropped:
            note = DROPPED.format(self.num_dropped)
            if not self._written(note, 0.0):
                self.num_dropped += text.count("\n")
                return
            self.num_dropped = 0
        if not self._written(text, WAIT_S):
            self.num_dropped += text.count("\n")

    def close(self) -> None:
        """Close what this object has opened; the descriptor that it was given stays open."""
        self._close()

    def flush(self) -> None:
        """Nothing is held back."""

    def _written(self, text: str, wait_s: float) -> bool:
        """Whether all of the text was written, or nobody will ever read it."""
        rest = memoryview(text.encode(errors="backslashreplace"))
        while rest:
            try:
                rest = rest[self._send(rest) :]
            except BlockingIOError:
                if not self._poll.poll(wait_s * 1e3):
                    return False
            except OSError:
                return True  # the reader is gone, or the disk is full: no line tells anybody
        return True


def log_stream(stream: TextIO) -> LogStream | TextIO:
    """What a handler should write to in place of ``stream``; the stream itself if it has no
    descriptor, as in tests."""
    try:
        return LogStream(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return stream


def _sender(descriptor: int) -> tuple[Callable[[memoryview], int], Callable[[], None]]:
    """A function that writes a part of the data and returns its size, or raises BlockingIOError,
    and one that ends it. The descriptor's own mode stays: other processes share it."""
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISSOCK(kind):
        peer = socket.socket(fileno=os.dup(descriptor))
        return lambda data: peer.send(data, socket.MSG_DONTWAIT), peer.close
    if stat.S_ISFIFO(kind) or stat.S_ISCHR(kind):
        with suppress(OSError):
            own = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
            return lambda data: os.write(own, data), lambda: os.close(own)
        # It belongs to another user. A pipe that is ready has room for PIPE_BUF bytes.
        return lambda data: _write_if_ready(descriptor, data), lambda: None
    return lambda data: os.write(descriptor, data), lambda: None


def _write_if_ready(descriptor: int, data: memoryview) -> int:
    if not select.select([], [descriptor], [], 0)[1]:
        raise BlockingIOError
    return os.write(descriptor, data[: select.PIPE_BUF])
