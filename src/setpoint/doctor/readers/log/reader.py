"""Reads a log: one pass, bounded memory, one ``Observations`` for each server that wrote it."""

from __future__ import annotations

import gc
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate

from setpoint.core.errors import SourceError
from setpoint.doctor.observations import Observations, Source
from setpoint.doctor.readers.log.batch_lines import is_known
from setpoint.doctor.readers.log.budget import Budget
from setpoint.doctor.readers.log.describe import observations, program_of, refuse
from setpoint.doctor.readers.log.messages import KEYWORDS, Message, message_of, quotes_a_client
from setpoint.doctor.readers.log.own_lines import has_own_line
from setpoint.doctor.readers.log.scan import Scanned, Scanner
from setpoint.doctor.readers.log.server_log import ServerLog, visible_text
from setpoint.doctor.readers.log.silence import TAIL, Clocks, clocks_of, silence_after
from setpoint.doctor.readers.log.stream import MAX_LINE, SwollenError, blocks, open_log
from setpoint.doctor.readers.log.table import BatchTable, Tables
from setpoint.doctor.readers.log.wrapping import unwrap

_END = re.compile(rb"\n")


def read_log(name: str, budget: Budget | None = None) -> list[Observations]:
    """The observations of the servers that wrote a log, usually one: of each its last life, or the
    one before if the last one shows nothing.

    name: a path, or "-" for standard input; gzip and Zstandard are unpacked. budget: the time that
    this log shares with others, by default its own. Raises SourceError if the log cannot be read or
    is not one of SGLang or Setpoint.
    """
    with open_log(name) as chunks:
        return read_chunks(name, chunks, budget)


def read_chunks(
    name: str, chunks: Iterable[bytes], budget: Budget | None = None
) -> list[Observations]:
    """Like ``read_log``, for the bytes of a log in any pieces."""
    reader = _Reader(name)
    budget = budget or Budget()
    with _without_collector():
        try:
            for block, complete in blocks(chunks):
                reader.block(block, complete)
                budget.read(len(block))
                if budget.is_spent:
                    reader.end_slow()
                    break
        except SwollenError as error:
            reader.end_early(str(error))
    return reader.finish()


@contextmanager
def _without_collector() -> Iterator[None]:
    """Switch the garbage collector off within the block. The rows of a log are many small objects
    without cycles, and searching them for cycles takes a quarter of the time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


MAX_SERVERS = 64
"""Most servers that are told apart in one log; a node runs fewer."""


class _Reader:
    def __init__(self, name: str) -> None:
        self._source = Source(name, "log")
        self._scanner, self._tables = Scanner(), Tables()
        self._servers: dict[str, ServerLog] = {}
        self._open: set[str] = set()
        """Servers of which a record of several lines has begun."""
        self._first = 1
        self._cut = ""
        """Why the rest of the log was not read."""
        self._is_ours = False
        """Whether it has a line that only SGLang or Setpoint writes."""
        self._program = ""
        """The other program that seems to have written the lines."""
        self._last_batches: dict[str, tuple[int, Clocks]] = {}
        """Origin -> the number of its last line about a batch, and its times."""
        self._last_lines = _Lines(b"")
        self._last_first = 1

    def block(self, block: bytes, complete: bool) -> None:
        """Take the next lines. complete: whether the last of them is whole."""
        scanned = self._scanner.scan(block)
        if not complete:
            self._cut_off(scanned)
        lines = _Lines(block)
        tables: dict[str, dict[str, BatchTable]] = {}
        for (origin, rank), table in self._tables.of(scanned.found).items():
            tables.setdefault(origin, {})[rank] = table
        scanned.found = [found for found in scanned.found if found.lines]
        impossible = [(n, lines.text(n).encode()) for n in sorted(self._tables.impossible)]
        scanned.not_understood += impossible
        self._count(scanned)
        self._is_ours = (
            self._is_ours
            or bool(scanned.found)
            or has_own_line([line for _, line in scanned.rest], from_start=self._first == 1)
        )
        tables = {origin: each for origin, each in tables.items() if self._server(origin)}
        for origin, server in self._servers.items():
            server.begin(tables.get(origin, {}), lines.text, self._first)
        if scanned.rest:
            self._messages(scanned.rest, tables, lines)
        for origin, server in self._servers.items():
            server.end(scanned.num_lines)
            self._note_last_batch(origin, tables.get(origin, {}), lines)
        self._last_lines = lines
        self._last_first, self._first = self._first, self._first + scanned.num_lines

    def end_slow(self) -> None:
        self.end_early(
            f"{self._source.name} is made of lines that take far longer to read than those of a"
            f" server; what is after line {self._first - 1} was left out."
        )

    def end_early(self, why: str) -> None:
        self._cut = why
        self._source.notes.append(why)

    def finish(self) -> list[Observations]:
        self._source.num_lines = self._first - 1
        found = [
            observations(self._source, origin, server, len(self._servers))
            for origin, server in self._servers.items()
        ]
        self._add_silence(found)
        telling = [each for each in found if any(rank.moments for rank in each.ranks)] or [
            each for each in found if any(rank.events for rank in each.ranks) or each.facts.said
        ]
        if not telling:
            if self._cut:
                raise SourceError(f"{self._cut} Before that, no server wrote anything.")
            refuse(self._source, self._program)
        if not self._is_ours:  # any program may run out of memory, or be killed
            refuse(self._source, self._program)
        return telling

    def _note_last_batch(self, origin: str, tables: dict[str, BatchTable], lines: _Lines) -> None:
        numbers = [int(table.line[-1]) for table in tables.values() if len(table)]
        if numbers:
            last = max(numbers)
            self._last_batches[origin] = self._first + last, clocks_of(lines.line(last))

    def _add_silence(self, found: list[Observations]) -> None:
        """Add what the last lines of the log show about the time after the last batch."""
        tail = [
            (self._last_first + number, line)
            for number, line in self._last_lines.last(TAIL)
            if line.strip()
        ]
        for origin, seen in zip(self._servers, found, strict=True):
            if origin not in self._last_batches:
                continue
            last, clocks = self._last_batches[origin]
            after = [
                (number, line, visible_text(line))
                for number, line in tail
                if number > last and unwrap(line).origin == origin
            ]
            seen.silence = silence_after(clocks, after)

    def _server(self, origin: str) -> ServerLog | None:
        """The log of the server with this origin; None if too many servers write to this log and
        this one is left out."""
        server = self._servers.get(origin)
        if server is None and len(self._servers) < MAX_SERVERS:
            server = self._servers[origin] = ServerLog(self._first)
        if server is None and not any("servers write" in note for note in self._source.notes):
            self._source.notes.append(
                f"More than {MAX_SERVERS} servers write to this log; the others were left out, from"
                f" line {self._first} on."
            )
        return server

    def _messages(
        self, rest: list[tuple[int, bytes]], tables: dict[str, dict[str, BatchTable]], lines: _Lines
    ) -> None:
        hits = _hits([line for _, line in rest])
        position = index = 0
        while True:
            while position < len(hits) and hits[position] < index:
                position += 1
            if not self._open:  # only lines with a keyword report anything
                if position == len(hits):
                    return
                index = hits[position]
            if index >= len(rest):
                return
            number, line = rest[index]
            has_word = position < len(hits) and hits[position] == index
            index += 1
            self._message(number, message_of(line), line, has_word, tables, lines)

    def _message(
        self,
        number: int,
        message: Message,
        line: bytes,
        has_word: bool,
        tables: dict[str, dict[str, BatchTable]],
        lines: _Lines,
    ) -> None:
        if quotes_a_client(message.text):
            return
        origin = message.origin
        is_new = origin not in self._servers
        server = self._server(origin)
        if server is None:
            return
        if is_new:
            server.begin(tables.get(origin, {}), lines.text, self._first)
        server.message(number, line, message, has_word)
        if server.is_open:
            self._open.add(origin)
        else:
            self._open.discard(origin)

    def _count(self, scanned: Scanned) -> None:
        source = self._source
        for found in scanned.found:
            source.num_batch_lines += len(found.lines)
            source.num_understood += len(found.lines)
            for name in found.shape.names:
                if not is_known(name):
                    count = source.unknown_fields.get(name, 0)
                    source.unknown_fields[name] = count + len(found.lines)
            server = self._server(found.shape.origin)
            if server is not None:
                server.life.styles.update(_marks(found.shape.names, found.shape.style))
        source.num_batch_lines += len(scanned.not_understood)
        if scanned.not_understood and not any("could not be read" in n for n in source.notes):
            number, line = min(scanned.not_understood)
            source.notes.append(
                f"Some batch lines could not be read; the first is line {self._first + number}:"
                f" {visible_text(line)[:120]}"
            )
        if not source.num_batch_lines and not self._program:
            head = b"\n".join(line[:200] for _, line in scanned.rest[:2000])
            self._program = program_of(head)

    def _cut_off(self, scanned: Scanned) -> None:
        """Note that the last line has no end. If it is not a whole batch line, it does not count as
        one."""
        last = scanned.num_lines - 1
        broken = [line for number, line in scanned.not_understood if number == last]
        if not broken:
            self._source.notes.append(
                "The last line is not complete: the server may still be writing to the log."
            )
            return
        scanned.not_understood.pop()
        self._source.notes.append("The last line is cut off and was ignored.")


def _marks(names: Iterable[str], style: str) -> Iterator[str]:
    yield f"style {style}"
    yield from names


def _hits(lines: list[bytes]) -> list[int]:
    """Indices of the lines that have one of the key words."""
    text = b"\n".join(lines)
    ends = list(accumulate(len(line) + 1 for line in lines))
    found: set[int] = set()
    for word in KEYWORDS:
        position = text.find(word)
        while position >= 0:
            index = bisect_right(ends, position)
            found.add(index)
            position = text.find(word, ends[index])
    return sorted(found)


class _Lines:
    """The lines of a block by number. Their beginnings are found when they are needed."""

    def __init__(self, block: bytes) -> None:
        self._block = block
        self._ends: list[int] | None = None

    def text(self, number: int) -> str:
        return visible_text(self.line(number))

    def last(self, count: int) -> list[tuple[int, bytes]]:
        """The last lines with their numbers."""
        self.line(0)
        assert self._ends is not None
        total = len(self._ends)
        return [(number, self.line(number)) for number in range(max(total - count, 0), total)]

    def line(self, number: int) -> bytes:
        if self._ends is None:
            self._ends = [*(end.start() for end in _END.finditer(self._block)), len(self._block)]
        start = self._ends[number - 1] + 1 if number else 0
        return self._block[start : self._ends[number]][:MAX_LINE]
