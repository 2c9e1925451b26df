"""Frames in a file: each is a marker, a length, a checksum and the payload, so a tail torn by a
crash can be told from damage. Does not know what is in a frame."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from setpoint.recording.format import RecordingError

_HEAD = struct.Struct("<4sII")
MARKER = b"\xf0SP\n"
"""Marks the beginning of a frame; occurs in no UTF-8 text."""


MAX_PAYLOAD_BYTES = 16 << 20
"""Largest payload. What a reader makes of one takes at most some sixty times as much memory."""
MAX_RATIO = 200
"""How many times larger a payload may be than its packed form. That of a run is five times as
large; zlib can reach a thousand."""
_ALWAYS_BYTES = 4096
"""A payload of this size may have any ratio."""
MAX_MARKERS = 16
"""Most markers behind the last whole frame that may be of a frame which a crash has torn. The
bytes of one hold a marker by accident once in 4 GiB."""


class FrameError(RecordingError):
    """A frame that cannot be unpacked, or must not be."""


def _limit(num_packed: int) -> int:
    """Largest payload of a frame with this many packed bytes."""
    return min(MAX_PAYLOAD_BYTES, _ALWAYS_BYTES + MAX_RATIO * num_packed)


def frame(payload: bytes) -> bytes:
    """The payload, compressed, as a frame. Raises FrameError for a payload that is too large."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise FrameError(f"A part of the recording has more than {MAX_PAYLOAD_BYTES} bytes.")
    packed = zlib.compress(payload, 1)
    if len(payload) > _limit(len(packed)):
        packed = zlib.compress(payload, 0)
    return _HEAD.pack(MARKER, len(packed), zlib.crc32(packed)) + packed


@dataclass(slots=True)
class FrameReader:
    """Iterates over the payloads of a file's frames, then says how the file ends. The iteration
    raises FrameError for a frame that is whole and cannot be unpacked."""

    data: bytes
    end: int = 0
    """Number of bytes from the beginning of the file that whole frames fill; written by the
    iteration."""

    def __iter__(self) -> Iterator[bytes]:
        while (found := _whole_frame(self.data, self.end)) is not None:
            packed, end = found
            payload = _unpacked(packed)
            self.end = end
            yield payload

    @property
    def num_torn(self) -> int:
        """Number of bytes after the last whole frame."""
        return len(self.data) - self.end

    @property
    def is_damaged(self) -> bool:
        """Whether a whole frame follows bytes that belong to none, or very many markers do, which
        a crash cannot cause."""
        at = self.end
        for _ in range(MAX_MARKERS):
            at = self.data.find(MARKER, at + 1)
            if at < 0 or _whole_frame(self.data, at) is not None:
                return at >= 0
        return True


def _whole_frame(data: bytes, begin: int) -> tuple[bytes, int] | None:
    """Packed payload and end of the frame that begins there; None if there is no whole one."""
    start = begin + _HEAD.size
    if start > len(data):
        return None
    marker, length, checksum = _HEAD.unpack_from(data, begin)
    packed = data[start : start + length]
    if marker != MARKER or len(packed) < length or zlib.crc32(packed) != checksum:
        return None
    return packed, start + length


def _unpacked(packed: bytes) -> bytes:
    """Raises FrameError."""
    limit, unpacker = _limit(len(packed)), zlib.decompressobj()
    try:
        payload = unpacker.decompress(packed, limit + 1)
    except zlib.error as error:
        raise FrameError(f"A frame cannot be unpacked: {error}.") from None
    if len(payload) > limit:
        raise FrameError(f"A frame of {len(packed)} bytes unpacks to more than {limit} bytes.")
    if not unpacker.eof or unpacker.unused_data:
        raise FrameError("A frame cannot be unpacked: it does not end where it should.")
    return payload
