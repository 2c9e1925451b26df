"""Reads and writes files of 3FS past the kernel, with 3FS's own library. Never run against a real
3FS: the tests put a stand-in in the library's place."""

from __future__ import annotations

import importlib
import os
import threading
from datetime import timedelta
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

from setpoint.tiers.remote_store import CALL_S
from setpoint.tiers.store import StoreError

LIBRARY = "hf3fs_fuse.io"
BUFFER_BYTES = 8 << 20
"""Bytes that are moved at a time: those of the memory that is shared with 3FS."""


class UsrbioIO:
    """Implements ``folder_client.FileIO``. One direction has one buffer, so it moves one file at a
    time."""

    def __init__(self, folder: Path) -> None:
        """folder: of a mounted 3FS. Raises ImportError without the library, StoreError if it cannot
        be used there."""
        self._library: Any = importlib.import_module(LIBRARY)
        try:
            mount = self._library.extract_mount_point(str(folder))
            self._reads = _Direction(self._library, mount, for_read=True)
            self._writes = _Direction(self._library, mount, for_read=False)
        except Exception as error:
            raise StoreError(f"3FS's library cannot use the folder {folder}: {error!r}.") from None

    def read(self, descriptor: int, size: int) -> bytes:
        return b"".join(self._reads.move(descriptor, size))

    def write(self, descriptor: int, data: bytes) -> None:
        os.ftruncate(descriptor, len(data))
        for _ in self._writes.move(descriptor, len(data), data):
            pass

    def close(self) -> None:
        self._reads.close()
        self._writes.close()


class _Direction:
    def __init__(self, library: Any, mount: str, *, for_read: bool) -> None:
        self._library, self._for_read = library, for_read
        self._lock = threading.Lock()
        self._memory = SharedMemory(create=True, size=BUFFER_BYTES)
        self._ring = library.make_ioring(mount, 1, for_read=for_read, timeout=1, numa=-1)
        self._buffer = library.make_iovec(self._memory, mount)
        self._memory.unlink()

    def move(self, descriptor: int, size: int, data: bytes = b"") -> list[bytes]:
        """Read ``size`` bytes, or write ``data``. Raises OSError for fewer."""
        found = []
        with self._lock:
            self._library.register_fd(descriptor)
            try:
                for at in range(0, size, BUFFER_BYTES):
                    part = min(BUFFER_BYTES, size - at)
                    if not self._for_read:
                        self._view[:part] = data[at : at + part]
                    self._ring.prepare(self._buffer[:part], self._for_read, descriptor, at)
                    (done,) = self._ring.submit().wait(
                        min_results=1, timeout=timedelta(seconds=CALL_S)
                    )
                    if done.result != part:
                        raise OSError(f"3FS moved {done.result} of {part} bytes")
                    if self._for_read:
                        found.append(bytes(self._view[:part]))
            finally:
                self._library.deregister_fd(descriptor)
        return found

    @property
    def _view(self) -> memoryview:
        assert self._memory.buf is not None
        return self._memory.buf

    def close(self) -> None:
        del self._ring, self._buffer
        self._memory.close()
