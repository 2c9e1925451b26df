"""One request of a batch file, or the reason why it is invalid, and facts about the batch as a
whole. Plain data; knows no file format and no engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from setpoint.core.errors import SetpointError

MAX_LINE_BYTES = 64 << 20
"""Length of the longest line that is read."""


class BatchError(SetpointError):
    """A batch that cannot begin or continue. The answers so far are safe in the output file."""


@dataclass(slots=True, frozen=True)
class Problem:
    """Why a request failed: a code for counting, and a sentence for the person who wrote it."""

    code: str
    message: str


@dataclass(slots=True, frozen=True, kw_only=True)
class Entry:
    """One line of a JSONL file, or one row of a Parquet file."""

    number: int
    """The line or row number, counted from 1."""
    num_bytes: int
    """Its size in the file, at least approximately."""
    custom_id: str | None = None
    url: str = ""
    body: dict[str, Any] | None = None
    problem: Problem | None = None
    """Set if the request cannot be sent; then ``body`` is empty."""


@dataclass(slots=True, frozen=True)
class Survey:
    """What one pass over the input has found."""

    digest: str
    """Digest of the file's bytes, 16 hexadecimal digits. It identifies the batch."""
    num_requests: int
    last_number: int
    """Number of lines or rows, including blank ones."""


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


class BatchInput(Protocol):
    """An input file, held open from the survey to the last entry."""

    def survey(self) -> Survey:
        """Read the whole input once. Raises BatchError for a file that cannot be read or has a
        ``custom_id`` twice."""

    def entries(self, survey: Survey, done: Marks) -> Iterator[Entry]:
        """The requests that are not marked, in order; each is read when the iterator reaches it.
        Raises BatchError."""

    def close(self) -> None: ...
