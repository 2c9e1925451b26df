"""Recordings that somebody made to cost memory or time, and damaged ones: one line of the
recording's own error, whoever reads it."""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from pathlib import Path

import msgspec
import pytest

from setpoint.core.errors import RecordingError
from setpoint.recording import frames
from setpoint.recording.frames import (
    MARKER,
    MAX_MARKERS,
    MAX_PAYLOAD_BYTES,
    FrameError,
    FrameReader,
    frame,
)
from setpoint.recording.recording_reader import open_recording
from setpoint_testing.harness import Harness
from setpoint_testing.recordings import record

HEAD = struct.Struct("<4sII")


def sealed(packed: bytes) -> bytes:
    """A frame with a right checksum around any bytes."""
    return HEAD.pack(MARKER, len(packed), zlib.crc32(packed)) + packed


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    harness = Harness()
    harness.submit("a", [1, 2, 3], max_new_tokens=8)
    harness.drain()
    return record(harness, tmp_path / "run")


def test_a_frame_that_unpacks_to_very_much_is_not_unpacked() -> None:
    """Red before: 3 MB of file became 3 GB in one call."""
    bomb = sealed(zlib.compress(bytes(200 << 20), 9))
    tracemalloc.start()
    try:
        with pytest.raises(FrameError, match="unpacks to more than"):
            next(iter(FrameReader(bomb)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * MAX_PAYLOAD_BYTES


def test_many_small_bombs_are_refused_by_their_ratio() -> None:
    bomb = sealed(zlib.compress(bytes(1 << 20), 9))
    with pytest.raises(FrameError, match="unpacks to more than"):
        next(iter(FrameReader(bomb * 1000)))


@pytest.mark.parametrize("payload", [b"", bytes(4 << 20), b"ab" * (1 << 20), bytes(range(256))])
def test_what_is_written_can_be_read(payload: bytes) -> None:
    """Text that packs very well is stored as it is."""
    assert list(FrameReader(frame(payload))) == [payload]


def test_a_payload_that_could_not_be_read_is_not_written() -> None:
    with pytest.raises(FrameError, match="more than"):
        frame(bytes(MAX_PAYLOAD_BYTES + 1))


def test_false_markers_are_looked_at_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red before: the rest of the file was summed up once for each of them."""
    summed = 0
    crc32 = zlib.crc32

    def counted(data: bytes) -> int:
        nonlocal summed
        summed += len(data)
        return crc32(data)

    monkeypatch.setattr(frames.zlib, "crc32", counted)
    false = b"".join(HEAD.pack(MARKER, 12 * (20_000 - at) - 12, 0) for at in range(20_000))
    reader = FrameReader(frame(b"x") + false)
    assert list(reader) == [b"x"]
    assert reader.is_damaged
    assert summed <= (MAX_MARKERS + 2) * len(false)


@pytest.mark.parametrize(
    ("packed", "words"),
    [
        (b"no zlib", "cannot be unpacked"),
        (zlib.compress(b"cut off, which the checksum does not show")[:-6], "cannot be unpacked"),
        (zlib.compress(b"x") + b"more", "cannot be unpacked"),
        (zlib.compress(b"\xc1"), "cannot be read"),
        (zlib.compress(b"\x91" * 200_000), "cannot be read|unpacks to more than"),
        (zlib.compress(msgspec.msgpack.encode([["O", "x", []]]).replace(b"x", b"\xff")), "read"),
    ],
)
def test_what_is_in_a_frame_is_damage(whole: Path, packed: bytes, words: str) -> None:
    """Red before: zlib.error and UnicodeDecodeError."""
    with whole.open("ab") as file:
        file.write(sealed(packed))
    with pytest.raises(RecordingError, match=words) as caught:
        list(open_recording(whole))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"x", MARKER, sealed(b"no zlib"), sealed(zlib.compress(b"\xff"))]
)
def test_what_begins_a_file_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run"
    path.write_bytes(content)
    with pytest.raises(RecordingError) as caught:
        open_recording(path)
    assert "\n" not in str(caught.value)
