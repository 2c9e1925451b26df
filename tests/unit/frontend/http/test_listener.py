"""Accepting connections, and beginning a few things in each turn of the loop."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial

import pytest
import uvloop

from setpoint.frontend.http import listener as listener_module
from setpoint.frontend.http.listener import Listener
from setpoint.frontend.http.pace import PER_TURN, TurnLimiter, Urgency
from setpoint.frontend.http.port import bind_socket

PATIENCE_S = 60.0


class Seen(asyncio.Protocol):
    """Counts connections; ``nodelay`` has whether each sends without waiting for more."""

    def __init__(self) -> None:
        self.nodelay: list[int] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        sock = transport.get_extra_info("socket")
        self.nodelay.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        transport.close()


class Poor(socket.socket):
    """Accepts nothing at first, as if the process had too many open files."""

    num_refused = 0

    def accept(self) -> tuple[socket.socket, object]:
        if self.num_refused < 2:
            self.num_refused += 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


def listening(
    kind: Callable[[], socket.socket], scenario: Callable[[Listener, Seen, TurnLimiter], Coroutine]
) -> None:
    async def main() -> None:
        with kind() as sock:
            seen, pace = Seen(), TurnLimiter(urgent=frozenset())
            server = Listener(sock, lambda: seen, pace)
            try:
                await scenario(server, seen, pace)
            finally:
                server.close()

    uvloop.run(main())


def bound() -> socket.socket:
    return bind_socket("127.0.0.1", 0)


def bound_poor() -> socket.socket:
    sock = Poor()
    sock.bind(("127.0.0.1", 0))
    return sock


@asynccontextmanager
async def connected(server: Listener) -> AsyncIterator[asyncio.StreamReader]:
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        yield reader
        writer.close()
        await writer.wait_closed()


def test_what_is_written_leaves_at_once() -> None:
    """A chunk of a stream does not wait for the acknowledgement of the last one, as with the loop's
    own listener."""

    async def scenario(server: Listener, seen: Seen, pace: TurnLimiter) -> None:
        async with connected(server) as reader:
            await reader.read()
        assert seen.nodelay == [1]

    listening(bound, scenario)


def test_a_process_with_too_many_files_tries_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listener_module, "RETRY_S", 0.01)

    async def scenario(server: Listener, seen: Seen, pace: TurnLimiter) -> None:
        async with connected(server) as reader:
            await reader.read()
        assert len(seen.nodelay) == 1

    listening(bound_poor, scenario)
    expected = "Cannot accept connections: Too many open files. Trying again in 0.01 s."
    assert [record.getMessage() for record in caplog.records] == [expected] * 2


def test_an_end_closes_what_was_not_opened_yet() -> None:
    async def scenario(server: Listener, seen: Seen, pace: TurnLimiter) -> None:
        opened: list[Callable[[], object]] = []
        pace.call = lambda function, rank: opened.append(function)  # type: ignore[method-assign]
        async with connected(server) as reader:
            while not opened:
                await asyncio.sleep(0)
            server.close()
            assert await reader.read() == b""
        opened[0]()  # does nothing
        assert seen.nodelay == []

    listening(bound, scenario)


def test_a_few_calls_in_each_turn_the_urgent_ones_first() -> None:
    async def main() -> None:
        pace, called = TurnLimiter(urgent=frozenset()), []
        for number in range(2 * PER_TURN):
            for rank in reversed(Urgency):
                pace.call(partial(called.append, (rank, number)), rank)
        assert called == sorted(called, key=lambda item: (item[1], -item[0])), "there was room"
        turns = [len(called)]
        while len(called) < 3 * 2 * PER_TURN:
            await asyncio.sleep(0)
            turns.append(len(called) - sum(turns))
        assert max(turns) == PER_TURN
        later = called[PER_TURN:]
        assert later == sorted(later, key=lambda item: (item[0], item[1]))

    uvloop.run(main())


def test_a_pace_at_rest_does_nothing() -> None:
    async def main() -> None:
        pace, called = TurnLimiter(urgent=frozenset()), []
        pace.call(partial(called.append, 1), Urgency.REQUEST)
        assert called == [1], "nothing waits: at once"
        for _ in range(5):
            await asyncio.sleep(0)
        assert not pace._is_counting

    uvloop.run(main())
