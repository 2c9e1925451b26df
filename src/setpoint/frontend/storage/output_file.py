"""The output tokens of a response while it runs, in a file of its own to which groups of them are
appended. A group is there as soon as its write has returned, also if the process is killed; after a
power cut the last groups may be missing or damaged, and reading ends before the first such one."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

_HEAD = struct.Struct("<II")
"""Of a group: how many bytes of ids follow, and their checksum. No group is empty, so zero bytes
are none."""


def append_group(path: Path, ids: bytes, *, at: int) -> int:
    """Write packed ids as the group that begins at this byte; returns where the next one begins.
    What an earlier attempt has left there is replaced. Raises OSError."""
    rest = memoryview(_HEAD.pack(len(ids), zlib.crc32(ids)) + ids)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        while rest:
            num_bytes = os.pwrite(fd, rest, at)
            at += num_bytes
            rest = rest[num_bytes:]
    finally:
        os.close(fd)
    return at


def read_groups(path: Path) -> tuple[bytes, int, int]:
    """The packed ids of all whole groups, where they end, and how many bytes follow that are none.
    A file that is not there is an empty one. Raises OSError."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return b"", 0, 0
    groups: list[bytes] = []
    at = 0
    while at + _HEAD.size <= len(content):
        num_bytes, checksum = _HEAD.unpack_from(content, at)
        start = at + _HEAD.size
        group = content[start : start + num_bytes]
        if not num_bytes or num_bytes % 4 or len(group) < num_bytes:
            break
        if zlib.crc32(group) != checksum:
            break
        groups.append(group)
        at = start + num_bytes
    return b"".join(groups), at, len(content) - at
