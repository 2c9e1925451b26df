"""Reads a recording: its header, its rows in order, and how it ends."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from setpoint.core.errors import RecordingError
from setpoint.recording.format import (
    FORMAT,
    MAX_COUNT,
    MAX_PAGES,
    MAX_SECONDS,
    Header,
    Kept,
    KeptResult,
    KeptTurn,
)
from setpoint.recording.frames import FrameError, FrameReader
from setpoint.recording.segments import segment_path, segments_there


class _Format(msgspec.Struct):
    format: int


_UNREADABLE = (msgspec.DecodeError, ValueError, RecursionError)
"""What decoding raises; ValueError for text that is not UTF-8."""
_rows = msgspec.msgpack.Decoder(list[Kept])


@dataclass(slots=True)
class Recording:
    """The files of one recording, in order. An iteration yields all rows up to the first damage and
    raises RecordingError there; it can be repeated.
    """

    segments: list[Path]
    header: Header
    """The header of the first segment that exists."""
    notes: list[str] = field(default_factory=list)
    """Notes on the files for the user; complete after an iteration."""

    def __iter__(self) -> Iterator[Kept]:
        self.notes.clear()
        for number, path in enumerate(self.segments):
            reader = FrameReader(_data(path))
            frames = _frames(reader, path)
            header = _header(next(frames, None), path)
            if header.recording != self.header.recording:
                raise RecordingError(f"{path} belongs to another recording.")
            for payload in frames:
                yield from _decode(payload, path)
            self._check_end(reader, path, is_last=number == len(self.segments) - 1)

    def _check_end(self, reader: FrameReader, path: Path, *, is_last: bool) -> None:
        if not reader.num_torn:
            return
        if not is_last or reader.is_damaged:
            raise RecordingError(f"{path} is damaged after {reader.end} bytes.")
        self.notes.append(
            f"{path} ends in the middle of a frame; its last {reader.num_torn} bytes are ignored."
        )


def open_recording(path: Path) -> Recording:
    """The recording whose first segment is, or was, ``path``. Raises RecordingError."""
    numbers = segments_there(path)
    if not numbers:
        raise RecordingError(f"There is no recording {path}.")
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        raise RecordingError(f"Parts of the recording {path} are missing: there are {numbers}.")
    segments = [segment_path(path, number) for number in numbers]
    frames = _frames(FrameReader(_data(segments[0])), segments[0])
    return Recording(segments, _header(next(frames, None), path))


def _frames(reader: FrameReader, path: Path) -> Iterator[bytes]:
    """The payloads of the file's frames. Raises a RecordingError that names the place."""
    try:
        yield from reader
    except FrameError as error:
        raise RecordingError(f"{path} is damaged after {reader.end} bytes: {error}") from None


def _data(path: Path) -> bytes:
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise RecordingError(f"{path} is not a file.")
    try:
        return path.read_bytes()
    except OSError as error:
        raise RecordingError(f"Cannot read {path}: {error.strerror}.") from None


def _header(payload: bytes | None, path: Path) -> Header:
    if payload is None:
        raise RecordingError(f"{path} is not a recording of Setpoint, or no part of it is intact.")
    try:
        number = msgspec.msgpack.decode(payload, type=_Format).format
        if number != FORMAT:
            raise RecordingError(
                f"{path} is a recording in format {number}; this version reads format {FORMAT}."
            )
        header = msgspec.msgpack.decode(payload, type=Header)
        _check(header)
        return header
    except _UNREADABLE as error:
        raise RecordingError(f"The header of {path} cannot be read: {error}.") from None


def _check(header: Header) -> None:
    """Raise ValueError for sizes and times that are impossible."""
    cache, scheduler, settings = header.cache, header.scheduler, header.settings
    sizes = {
        "num_pages": (cache.num_pages, MAX_PAGES),
        "page_size": (cache.page_size, MAX_COUNT),
        "num_slots": (scheduler.num_slots, MAX_COUNT),
        "max_req_len": (scheduler.max_req_len, MAX_COUNT),
        "decode_log_interval": (settings.decode_log_interval, sys.maxsize),
    }
    for name, (value, most) in sizes.items():
        if not 1 <= value <= most:
            raise ValueError(f"{name} is {value}")
    for name, at in (("began_at", header.began_at), ("clock_at", header.clock_at)):
        if not abs(at) <= MAX_SECONDS:
            raise ValueError(f"{name} is {at}")


def _decode(payload: bytes, path: Path) -> list[Kept]:
    try:
        rows = _rows.decode(payload)
        for row in rows:
            if isinstance(row, KeptTurn | KeptResult) and not abs(row.at) <= MAX_SECONDS:
                raise ValueError(f"a time is {row.at}")
        return rows
    except _UNREADABLE as error:
        raise RecordingError(f"A part of {path} cannot be read: {error}.") from None
