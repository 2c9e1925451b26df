"""Messages on a stream: bytes after their length."""

from __future__ import annotations

import struct

LENGTH = struct.Struct("<I")


def framed(data: bytes) -> bytes:
    """A message as it goes onto the stream."""
    return LENGTH.pack(len(data)) + data


class Unpacker:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that are complete with these bytes."""
        self._data += data
        found, begin = [], 0
        while len(self._data) - begin >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._data, begin)
            end = begin + LENGTH.size + length
            if end > len(self._data):
                break
            found.append(bytes(self._data[begin + LENGTH.size : end]))
            begin = end
        del self._data[:begin]
        return found
