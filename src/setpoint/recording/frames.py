"""Frames in a file: each is a marker, a length, a checksum and the payload, so that a tail torn by
a crash can be distinguished from damage. Does not know what is in a frame."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from setpoint.core.errors import RecordingError

_HEAD = struct.Struct("<4sII")
MARKER = b"\xf0SP\n"
"""Marks the beginning of a frame; does not occur in UTF-8 text."""

MAX_PAYLOAD_BYTES = 16 << 20
"""Largest payload. Decoded, it takes at most some sixty times as much memory."""
MAX_RATIO = 200
"""Largest ratio of a payload's size to that of its packed form. A real one is about five; zlib can
reach a thousand."""
_ALWAYS_BYTES = 4096
"""A payload of this size may have any ratio."""
MAX_MARKERS = 16
"""Number of markers after the last whole frame from which the file counts as damaged. The bytes of
a torn frame contain a marker by accident once in 4 GiB."""


class FrameError(RecordingError):
    """A frame that cannot be unpacked, or that is too large to be."""


def _limit(num_packed: int) -> int:
    """Largest payload of a frame with this many packed bytes."""
    return min(MAX_PAYLOAD_BYTES, _ALWAYS_BYTES + MAX_RATIO * num_packed)


def frame(payload: bytes) -> bytes:
    """The frame of a payload, which it compresses. Raises FrameError if the payload is too
    large."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise FrameError(f"A part of the recording has more than {MAX_PAYLOAD_BYTES} bytes.")
    packed = zlib.compress(payload, 1)
    if len(payload) > _limit(len(packed)):
        packed = zlib.compress(payload, 0)
    return _HEAD.pack(MARKER, len(packed), zlib.crc32(packed)) + packed


@dataclass(slots=True)
class FrameReader:
    """Iterates over the payloads of a file's frames, then says how the file ends. The iteration
    raises FrameError for a frame that is whole but cannot be unpacked."""

    data: bytes
    end: int = 0
    """Number of bytes of the whole frames read so far; written by the iteration."""

    def __iter__(self) -> Iterator[bytes]:
        while (found := _whole_frame(self.data, self.end)) is not None:
            packed, end = found
            payload = _unpack(packed)
            self.end = end
            yield payload

    @property
    def num_torn(self) -> int:
        """Number of bytes after the last whole frame."""
        return len(self.data) - self.end

    @property
    def is_damaged(self) -> bool:
        """Whether bytes that belong to no frame are followed by a whole frame, or by more markers
        than a crash can leave."""
        at = self.end
        for _ in range(MAX_MARKERS):
            at = self.data.find(MARKER, at + 1)
            if at < 0 or _whole_frame(self.data, at) is not None:
                return at >= 0
        return True


def _whole_frame(data: bytes, begin: int) -> tuple[bytes, int] | None:
    """(packed payload, end) of the frame at ``begin``; None if there is no whole one."""
    start = begin + _HEAD.size
    if start > len(data):
        return None
    marker, length, checksum = _HEAD.unpack_from(data, begin)
    packed = data[start : start + length]
    if marker != MARKER or len(packed) < length or zlib.crc32(packed) != checksum:
        return None
    return packed, start + length


def _unpack(packed: bytes) -> bytes:
    """The payload of a frame. Raises FrameError."""
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
