"""A lock between processes: a file, which its holder removes in the end."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock in the block, and remove its file then. Who has waited for a file that was
    removed meanwhile waits for the next one."""
    while True:
        with path.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                is_still_there = os.path.samestat(path.stat(), os.fstat(lock.fileno()))
            except FileNotFoundError:
                is_still_there = False
            if is_still_there:
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return
