"""The parts of a server's storage together."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from setpoint.core.errors import RequestError
from setpoint.frontend.storage.batches import BatchBook
from setpoint.frontend.storage.files import FileStore, Limits
from setpoint.frontend.storage.folder import StorageFolder


class Storage:
    def __init__(
        self, path: Path, *, limits: Limits | None = None, now: Callable[[], float] = time.time
    ) -> None:
        """Open the folder of ``--file-storage-path``. Raises ConfigError if it cannot be used."""
        self._folder = StorageFolder(path)
        self.files = FileStore(self._folder.files, limits=limits or Limits(), now=now)
        self.batches = BatchBook(self._folder.batches, self.files, now=now)
        self.now = now

    def close(self) -> None:
        """Let another server have the folder."""
        self._folder.close()


def required(storage: Storage | None) -> Storage:
    """Raises RequestError (400) on a server that keeps nothing on disk."""
    if storage is None:
        raise RequestError(
            "This server does not store files and batches. Start it with --file-storage-path"
            " FOLDER to"
            " store them there."
        )
    return storage
