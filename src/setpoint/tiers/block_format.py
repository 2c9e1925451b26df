"""The bytes of a block outside this process, in files and in every other storage: a header, which
says whose block it is, and the block itself. A reader trusts nothing but the checksums."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import xxhash

from setpoint.tiers.block_keys import KEY_BYTES
from setpoint.tiers.store import Bytes

MAGIC = b"SPKVB1\r\n"
OWNER_BYTES = 16
_HEAD = struct.Struct(f"<8s{KEY_BYTES}s{OWNER_BYTES}sQ16s")
"""Magic, name, owner, number of bytes, their checksum; a checksum of this follows."""
HEADER_BYTES = _HEAD.size + 8


@dataclass(slots=True, frozen=True)
class BlockHeader:
    """What a header says."""

    owner: bytes
    num_bytes: int
    """The size of the block that follows."""
    checksum: bytes

    def fits(self, data: Bytes) -> bool:
        """Whether these are the block's bytes."""
        return len(data) == self.num_bytes and xxhash.xxh3_128_digest(data) == self.checksum


def header_of(key: bytes, owner: bytes, data: Bytes) -> bytes:
    """The HEADER_BYTES that stand in front of a block."""
    head = _HEAD.pack(MAGIC, key, owner, len(data), xxhash.xxh3_128_digest(data))
    return head + xxhash.xxh3_64_digest(head)


def read_header(head: bytes, key: bytes | None = None) -> BlockHeader | None:
    """What HEADER_BYTES say; None if they are not the header of a block, or of another block than
    ``key``."""
    if len(head) != HEADER_BYTES or xxhash.xxh3_64_digest(head[: _HEAD.size]) != head[_HEAD.size :]:
        return None
    magic, name, owner, num_bytes, checksum = _HEAD.unpack(head[: _HEAD.size])
    if magic != MAGIC or (key is not None and name != key):
        return None
    return BlockHeader(owner, num_bytes, checksum)


def framed(key: bytes, owner: bytes, data: Bytes) -> bytes:
    """A header and the block."""
    return header_of(key, owner, data) + data.tobytes()


def unframed(key: bytes, value: bytes | memoryview) -> Bytes | None:
    """The block in what ``framed`` made, without a copy; None if the bytes are anything else."""
    view = memoryview(value).cast("B")
    header = read_header(bytes(view[:HEADER_BYTES]), key)
    if header is None:
        return None
    data = np.frombuffer(view[HEADER_BYTES:], np.uint8)
    return data if header.fits(data) else None
