"""A log that nobody reads holds up nobody."""

from __future__ import annotations

import io
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from setpoint.observe import log_stream as module
from setpoint.observe.log_stream import LogStream, log_stream

LINE = "x" * 99 + "\n"
Pair = tuple[int, int]


def pipe() -> Pair:
    return os.pipe()


def sockets() -> Pair:
    ours, theirs = socket.socketpair()
    return ours.detach(), theirs.detach()


@pytest.fixture(params=[pipe, sockets])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made: Callable[[], Pair] = request.param
    reads, writes = made()
    yield reads, writes
    for each in (reads, writes):
        os.close(each)


def drained(reads: int) -> bytes:
    os.set_blocking(reads, False)
    found = b""
    while True:
        try:
            found += os.read(reads, 1 << 20)
        except BlockingIOError:
            return found


def test_lines_that_nobody_reads_are_dropped_and_counted(pair: Pair) -> None:
    reads, writes = pair
    stream = LogStream(writes)
    for _ in range(20_000):
        stream.write(LINE)
    assert stream.num_dropped > 1000
    num_dropped = stream.num_dropped
    lines = drained(reads).decode().splitlines()
    assert set(lines[:-1]) == {LINE[:-1]}
    assert num_dropped + len(lines) in (20_000, 20_001)  # the last one may be cut
    stream.write("and on\n")
    assert stream.num_dropped == 0
    found = drained(reads).decode()
    assert f"... {num_dropped} lines of the log were dropped here" in found
    assert found.endswith("\nand on\n")
    stream.close()


def test_the_mode_of_the_descriptor_stays(pair: Pair) -> None:
    stream = LogStream(pair[1])
    stream.write(LINE)
    assert os.get_blocking(pair[1])
    stream.close()


def test_a_pipe_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object) -> int:
        raise PermissionError

    reads, writes = os.pipe()
    monkeypatch.setattr(module.os, "open", refused)
    stream = LogStream(writes)
    for _ in range(2000):
        stream.write(LINE)
    assert stream.num_dropped > 100
    assert drained(reads).decode().startswith(LINE)


def test_a_reader_that_has_gone_and_other_streams(tmp_path: Path) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    LogStream(writes).write(LINE)
    path = tmp_path / "log"
    with path.open("w") as file:
        stream = log_stream(file)
        assert isinstance(stream, LogStream)
        stream.write("ä\udc80\n")
        stream.flush()
    assert path.read_bytes() == "ä\\udc80\n".encode()
    memory = io.StringIO()
    assert log_stream(memory) is memory
