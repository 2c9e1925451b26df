"""The input as JSON lines in OpenAI's batch format: ``{"custom_id", "method", "url", "body"}``, one
per line.

Reads a regular file in order, a line at a time. Blank lines are ignored.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

import msgspec

from setpoint.batch.duplicates import Duplicates
from setpoint.batch.entry import MAX_LINE_BYTES, BatchError, Entry, Marks, Problem, Survey
from setpoint.core.plain_file import open_at_once
from setpoint.core.wording import validation_message
from setpoint.frontend.json_shape import excess

_GZIP = b"\x1f\x8b"


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


class _Id(msgspec.Struct):
    custom_id: Any = None


_decode_line = msgspec.json.Decoder(_Line).decode
_decode_id = msgspec.json.Decoder(_Id).decode


class JsonlSource:
    def __init__(self, path: Path, *, max_body_bytes: int | None = None) -> None:
        """Open the file. max_body_bytes: if set, a line may have this many bytes, and must be as
        simple as the body of a request over HTTP, because others wait while it is decoded. Raises
        BatchError unless it is a readable regular file."""
        self._path = path
        self._max_bytes = MAX_LINE_BYTES if max_body_bytes is None else max_body_bytes
        self._must_be_simple = max_body_bytes is not None
        self._file = open_input(path)

    def survey(self) -> Survey:
        digest = digest_of(self._file)
        duplicates = Duplicates()
        num_lines = num_requests = 0
        for num_lines, line in self._lines():  # noqa: B007 - wanted after the loop
            if not line.isspace():
                num_requests += 1
                duplicates.add(_custom_id(line))
        duplicates.check(
            ((number, _custom_id(line)) for number, line in self._lines()), what="lines"
        )
        return Survey(digest, num_requests, num_lines)

    def entries(self, survey: Survey, done: Marks) -> Iterator[Entry]:
        for number, line in self._lines():
            if number > survey.last_number:
                return  # lines that were added since the survey are not part of this batch
            if number not in done and not line.isspace():
                yield self._entry(number, line)

    def close(self) -> None:
        self._file.close()

    def _entry(self, number: int, line: bytes) -> Entry:
        if not line:
            message = f"The line is longer than {self._max_bytes} bytes."
            return _bad(number, line, "too_long", message)
        if self._must_be_simple and (too_much := excess(line)) is not None:
            return _bad(number, b"", "too_complex", f"The line {too_much}.")
        return parse_line(number, line)

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Yields (number, line). A line that is too long is yielded as b"", and no more of its
        bytes are ever in memory than a line may have."""
        try:
            self._file.seek(0)
            number = 0
            while line := self._file.readline(self._max_bytes):
                number += 1
                is_too_long = False
                while len(line) == self._max_bytes and not line.endswith(b"\n"):
                    is_too_long, line = True, self._file.readline(self._max_bytes)
                yield number, b"" if is_too_long else line
        except OSError as error:
            raise BatchError(f"{self._path} cannot be read: {error.strerror}.") from None


def parse_line(number: int, line: bytes) -> Entry:
    """The entry of a line. It never raises: an invalid line's entry has a ``problem``."""
    try:
        request = _decode_line(line)
    except msgspec.ValidationError as error:
        return _bad(number, line, "bad_request", validation_message(error, whole="The line"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return _bad(number, line, "not_json", f"The line is not valid JSON: {error}.")
    if not request.custom_id:
        return _bad(number, line, "bad_request", "custom_id must not be empty.")
    if request.method != "POST":
        return _bad(number, line, "bad_request", f"method must be POST, got {request.method!r}.")
    return Entry(
        number=number,
        num_bytes=len(line),
        custom_id=request.custom_id,
        url=request.url,
        body=request.body,
    )


def _bad(number: int, line: bytes, code: str, message: str) -> Entry:
    return Entry(
        number=number,
        num_bytes=len(line),
        custom_id=_custom_id(line),
        problem=Problem(code, message),
    )


def _custom_id(line: bytes) -> str | None:
    """The id of a line whose other content may be anything."""
    try:
        found = _decode_id(line).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return found if isinstance(found, str) and found else None


def open_input(path: Path) -> BufferedReader[FileIO]:
    """Open a regular file for reading. Raises BatchError."""
    try:
        file = BufferedReader(FileIO(path, opener=open_at_once), 1 << 20)
    except OSError as error:
        raise BatchError(f"{path} cannot be read: {error.strerror}.") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise BatchError(f"{path} is not a regular file; a batch reads its input more than once.")
    if file.peek(2)[:2] == _GZIP:
        file.close()
        raise BatchError(f"{path} is compressed with gzip; unpack it first.")
    return file


def digest_of(file: BufferedReader[FileIO]) -> str:
    """Digest of all bytes of the file. Raises BatchError."""
    try:
        file.seek(0)
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8)).hexdigest()
    except OSError as error:
        raise BatchError(f"{file.name} cannot be read: {error.strerror}.") from None
