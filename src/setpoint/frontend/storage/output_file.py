"""Reads and writes the output tokens of a running response, in a file to which groups of tokens are
appended. A group survives a kill of the process as soon as its write has returned. After a power
cut, the last groups may be missing or damaged; reading ends before the first damaged group."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

_HEAD = struct.Struct("<II")
"""The header of a group: the number of bytes of ids that follow, and their checksum. No group is
empty, so a header of zero bytes is not a group."""


def append_group(path: Path, ids: bytes, *, at: int) -> int:
    """Write packed ids as the group that begins at byte ``at``; returns the offset at which the
    next group begins. Replaces what an earlier attempt has left there. Raises OSError."""
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
    """The packed ids of all whole groups, the offset at which these groups end, and the number of
    bytes after them. A missing file counts as empty. Raises OSError."""
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
