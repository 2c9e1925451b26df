"""Files and the page cache: to bring a file in, or to take it out."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

PAGE = mmap.PAGESIZE


def read_into_cache(path: Path) -> None:
    with path.open("rb") as file:
        while file.read(1 << 24):
            pass


def drop_from_cache(path: Path) -> None:
    """Take a file's pages out of the page cache. Raises RuntimeError if some stay, as those do that
    a process has mapped."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if share := share_in_cache(path):
        raise RuntimeError(f"{share:.0%} of {path} stay in the page cache.")


def share_in_cache(path: Path) -> float:
    """The share of a file's pages that are in the page cache."""
    size = path.stat().st_size
    if size == 0:
        return 0.0
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as view:
        pages = -(-size // PAGE)
        found = (ctypes.c_ubyte * pages)()
        begin = ctypes.c_char.from_buffer(view)
        failed = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(ctypes.addressof(begin)), ctypes.c_size_t(size), found
        )
        del begin  # a view that something points to cannot be closed
        if failed:
            raise OSError(ctypes.get_errno(), f"mincore of {path}")
        return sum(each & 1 for each in found) / pages
