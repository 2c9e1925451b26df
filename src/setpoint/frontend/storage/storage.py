"""The folder of ``--file-storage-path``, with the documents and the content of files, batches and
responses in the background."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from setpoint.core.errors import ConfigError, RequestError
from setpoint.frontend.storage.background import BackgroundBook
from setpoint.frontend.storage.batches import BatchBook
from setpoint.frontend.storage.documents import Documents
from setpoint.frontend.storage.files import UploadLimits, UploadStore


class Storage:
    def __init__(
        self,
        path: Path,
        *,
        limits: UploadLimits | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Open or create the folder; only its owner can read it. Raises ConfigError if it cannot be
        used."""
        files, batches, responses = path / "files", path / "batches", path / "responses"
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in (files, batches, responses):
                folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--file-storage-path {path} cannot be used: {error.strerror}."
            ) from None
        if any(files.glob("file-*.json")) or any(batches.glob("batch_*.json")):
            raise ConfigError(
                f"--file-storage-path {path} was written by an earlier version, which this one"
                " cannot read; name another folder."
            )
        self._documents = Documents(path)
        try:
            self.files = UploadStore(
                files, self._documents, limits=limits or UploadLimits(), now=now
            )
            self.batches = BatchBook(batches, self._documents, self.files, now=now)
            self.background = BackgroundBook(responses, self._documents)
        except ConfigError:
            self._documents.close()
            raise
        self.now = now

    def close(self) -> None:
        """Close the folder, so that another server can use it."""
        self._documents.close()


def require_storage(storage: Storage | None) -> Storage:
    """The server's storage. Raises RequestError (400) if the server has none."""
    if storage is None:
        raise RequestError(
            "This server does not store files and batches. Start it with --file-storage-path"
            " FOLDER to store them there."
        )
    return storage
