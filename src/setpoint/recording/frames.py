"""Frames in a file: each is a marker, a length, a checksum and the payload, so a tail torn by a
crash can be told from damage. Does not know what is in a frame."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

_HEAD = struct.Struct("<4sII")
MARKER = b"\xf0SP\n"
"""Marks the beginning of a frame; occurs in no UTF-8 text."""


def frame(payload: bytes) -> bytes:
    """The payload, compressed, as a frame."""
    packed = zlib.compress(payload, 1)
    return _HEAD.pack(MARKER, len(packed), zlib.crc32(packed)) + packed


@dataclass(slots=True)
class FrameReader:
    """Iterates over the payloads of a file's frames, then says how the file ends."""

    data: bytes
    end: int = 0
    """Number of bytes from the beginning of the file that whole frames fill; written by the
    iteration."""

    def __iter__(self) -> Iterator[bytes]:
        while (found := _whole_frame(self.data, self.end)) is not None:
            payload, self.end = found
            yield payload

    @property
    def num_torn(self) -> int:
        """Number of bytes after the last whole frame."""
        return len(self.data) - self.end

    @property
    def is_damaged(self) -> bool:
        """Whether a whole frame follows bytes that belong to none, which a crash cannot cause."""
        at = self.data.find(MARKER, self.end + 1)
        while at >= 0:
            if _whole_frame(self.data, at) is not None:
                return True
            at = self.data.find(MARKER, at + 1)
        return False


def _whole_frame(data: bytes, begin: int) -> tuple[bytes, int] | None:
    """Payload and end of the frame that begins there; None if there is no whole one."""
    start = begin + _HEAD.size
    if start > len(data):
        return None
    marker, length, checksum = _HEAD.unpack_from(data, begin)
    packed = data[start : start + length]
    if marker != MARKER or len(packed) < length or zlib.crc32(packed) != checksum:
        return None
    return zlib.decompress(packed), start + length
