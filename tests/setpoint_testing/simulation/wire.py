"""Two connected stream sockets in virtual time: bytes take a while, arrive in order and in pieces of
any size, and what a process has written before it ends still arrives."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from itertools import count

from setpoint_testing.simulation.virtual_time import VirtualLoop

CAPACITY = 3000
"""Bytes that one direction holds, a few messages, so that senders have to wait, too."""
SPLIT = 0.1
"""Chance that a reader finds only the first part of what was written at once."""


class Direction:
    """Bytes on their way from one end to the other."""

    def __init__(self, loop: VirtualLoop, rng: random.Random, delay_s: Callable[[], float]) -> None:
        self._loop = loop
        self._rng = rng
        self._delay_s = delay_s
        self._coming: deque[tuple[float, bytes]] = deque()
        """(when it was written, what), in order."""
        self._last_at = 0.0
        self.arrived = bytearray()
        self.has_ended = False
        """Whether nothing more comes, and the reader may know it."""
        self._is_closed = False
        self._size = 0
        self.on_arrival: Callable[[], None] = lambda: None
        self.on_room: Callable[[], None] = lambda: None

    @property
    def room(self) -> int:
        return CAPACITY - self._size

    def write(self, data: bytes, at: float) -> int:
        """Returns how many of the bytes there was room for."""
        if self._is_closed:
            raise BrokenPipeError
        if self.room <= 0:
            raise BlockingIOError
        data = data[: self.room]
        self._size += len(data)
        at_once = len(data)
        if len(data) > 1 and self._rng.random() < SPLIT:
            at_once = self._rng.randrange(1, len(data))
        for part in (data[:at_once], data[at_once:]):
            if part:
                self._send(part, at)
        return len(data)

    def _send(self, data: bytes, at: float) -> None:
        self._coming.append((at, data))
        self._last_at = max(self._last_at, at + self._delay_s())
        self._loop.call_at(self._last_at, self._arrive)

    def _arrive(self) -> None:
        if self._coming:
            self.arrived += self._coming.popleft()[1]
            self.on_arrival()

    def take(self, most: int) -> bytes:
        if not self.arrived and self.has_ended:
            return b""
        if not self.arrived:
            raise BlockingIOError
        data = bytes(self.arrived[:most])
        del self.arrived[:most]
        was_full = self.room <= 0
        self._size -= len(data)
        if was_full:
            self.on_room()
        return data

    def close(self, at: float) -> None:
        """Its writer ends: what it would have written after ``at`` never was, except perhaps for
        the first bytes."""
        if self._is_closed:
            return
        self._is_closed = True
        lost = [data for written, data in self._coming if written > at]
        while self._coming and self._coming[-1][0] > at:
            self._coming.pop()
        if lost and self._rng.random() < 0.5:
            self._coming.append((at, lost[0][: self._rng.randrange(len(lost[0]))]))
        self._loop.call_at(max(self._last_at, at), self._end)

    def _end(self) -> None:
        while self._coming:
            self._arrive()
        self.has_ended = True
        self.on_arrival()


class End:
    """One end, as ``ipc.sockets`` uses a socket."""

    def __init__(
        self, number: int, loop: VirtualLoop, reading: Direction, writing: Direction
    ) -> None:
        self._number = number
        self._reading = reading
        self._writing = writing
        self.clock: Callable[[], float] = loop.time
        """The time of its process, which may be ahead of the loop's while that computes a step."""
        loop.files[number] = self
        reading.on_arrival = lambda: loop.notify_readable(number)
        writing.on_room = lambda: loop.notify_writable(number)

    @property
    def is_readable(self) -> bool:
        return bool(self._reading.arrived) or self._reading.has_ended

    @property
    def is_writable(self) -> bool:
        return self._writing.room > 0

    def setblocking(self, flag: bool) -> None:
        assert not flag

    def fileno(self) -> int:
        return self._number

    def send(self, data: bytes | bytearray) -> int:
        return self._writing.write(bytes(data), self.clock())

    def recv(self, most: int) -> bytes:
        return self._reading.take(most)

    def close(self, at: float | None = None) -> None:
        """at: when, if it was not now."""
        self._writing.close(self.clock() if at is None else at)


def socket_pair(
    loop: VirtualLoop, rng: random.Random, numbers: count[int], delay_s: Callable[[], float]
) -> tuple[End, End]:
    """delay_s: how long the next bytes take."""
    there, back = (Direction(loop, rng, delay_s) for _ in range(2))
    return (
        End(next(numbers), loop, reading=back, writing=there),
        End(next(numbers), loop, reading=there, writing=back),
    )
