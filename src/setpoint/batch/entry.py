"""One request of a batch file, or what is wrong with it, and the batch as a whole. Plain data;
knows no file format and no engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from setpoint.core.errors import SetpointError

MAX_LINE_BYTES = 64 << 20
"""Longest line that is read."""


class BatchError(SetpointError):
    """A batch that cannot begin or go on. What has been answered is safe in the output file."""


@dataclass(slots=True, frozen=True)
class Problem:
    """Why a request failed: a code to count by, and the sentence for its owner."""

    code: str
    message: str


@dataclass(slots=True, frozen=True, kw_only=True)
class Entry:
    """One line of a JSONL file, or one row of a Parquet file."""

    number: int
    """The line or row, from 1."""
    num_bytes: int
    """Its size in the file, or about that."""
    custom_id: str | None = None
    url: str = ""
    body: dict[str, Any] | None = None
    problem: Problem | None = None
    """Set if it cannot be sent; then there is no body."""


@dataclass(slots=True, frozen=True)
class Survey:
    """What one pass over the input found."""

    digest: str
    """Of the file's bytes, 16 hexadecimal digits: the batch's identity."""
    num_requests: int
    last_number: int
    """Lines or rows, blank ones included."""


class Marks:
    """One bit per line: which requests have been answered."""

    def __init__(self, last_number: int) -> None:
        self._bits = bytearray(last_number // 8 + 1)
        self.last = 0
        """The highest number that is marked."""

    def add(self, number: int) -> None:
        assert number not in self
        self._bits[number >> 3] |= 1 << (number & 7)
        self.last = max(self.last, number)

    def __contains__(self, number: int) -> bool:
        return bool(self._bits[number >> 3] >> (number & 7) & 1)


class Source(Protocol):
    """An input file, held open from the survey to the last entry."""

    def survey(self) -> Survey:
        """Raises BatchError for a file that cannot be read or holds a ``custom_id`` twice."""

    def entries(self, survey: Survey, done: Marks) -> Iterator[Entry]:
        """The requests that are not marked, in order, read as they are asked for. Raises
        BatchError."""

    def close(self) -> None: ...
