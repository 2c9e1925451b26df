"""Stores the files that clients have uploaded and that batches have written. A client's name for a
file is only data; on disk, the name of a file is its id."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import msgspec

from setpoint.core.errors import RequestError
from setpoint.core.excerpt import quoted
from setpoint.frontend.storage.documents import Documents, cannot_store, is_id, new_id

KIND, PREFIX = "file", "file-"
_PART = ".part"
"""Suffix of content that is being written."""


@dataclass(slots=True, frozen=True, kw_only=True)
class UploadLimits:
    """Limits of what clients may upload. What batches write counts, but is never refused."""

    file_bytes: int = 512 << 20
    num_files: int = 10_000
    total_bytes: int = 64 << 30


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a file, whose content is stored separately."""

    id: str
    num_bytes: int
    created_at: int
    """Unix time in seconds, like every time in this module."""
    filename: str
    """The client's name for the file. It is never part of a path."""
    purpose: str
    expires_at: int | None = None
    """When the file is deleted; None: never."""


class UploadStore:
    """Used on the event loop only."""

    def __init__(
        self,
        folder: Path,
        documents: Documents,
        *,
        limits: UploadLimits,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Read what an earlier server has stored, and remove its unfinished uploads. folder: the
        folder for content."""
        self._folder = folder
        self._documents = documents
        self._limits = limits
        self.now = now
        self._files = {
            file.id: file for file in documents.all(KIND, StoredFile) if self.path(file.id).exists()
        }
        known = documents.ids(KIND)  # the content of a damaged document may still be needed
        for path in folder.glob(f"{PREFIX}*"):
            if path.name not in known and is_id(path.name.removesuffix(_PART), PREFIX):
                path.unlink()
        self._num_bytes = sum(file.num_bytes for file in self._files.values())
        """Bytes of all files, and of uploads so far."""
        self._num_uploads = 0
        self._held: dict[str, set[str]] = {}
        """File -> the batches that still read it; it is neither deleted nor does it expire."""

    def listing(self) -> list[StoredFile]:
        """All files, oldest first."""
        self._forget_expired()
        return list(self._files.values())

    def get(self, file_id: str) -> StoredFile:
        """The file with this id. Raises RequestError (404)."""
        self._forget_expired()
        file = self._files.get(file_id)
        if file is None:
            raise RequestError(
                f"There is no file {quoted(file_id, 64)}.",
                status_code=404,
            )
        return file

    def path(self, file_id: str) -> Path:
        """The path of a file's content. ``file_id`` must be an id of this store, never text from a
        client."""
        return self._folder / file_id

    def delete(self, file_id: str) -> None:
        """Delete a file. Raises RequestError: 404, or 400 for a file that a batch still reads."""
        file = self.get(file_id)
        if self._held.get(file.id):
            batch = next(iter(self._held[file.id]))
            raise RequestError(
                f"File {file.id} is the input of {batch}, which has not ended; cancel the batch"
                " first."
            )
        self._remove(file)

    def hold(self, file_id: str, batch_id: str) -> None:
        self._held.setdefault(file_id, set()).add(batch_id)

    def release(self, file_id: str, batch_id: str) -> None:
        self._held.get(file_id, set()).discard(batch_id)

    def upload(self) -> Upload:
        """Begin a client's upload. Raises RequestError: 400 if there are too many files, 507."""
        self._forget_expired()
        if len(self._files) + self._num_uploads >= self._limits.num_files:
            raise RequestError(
                f"This server stores at most {self._limits.num_files} files; delete some."
            )
        return Upload(self, new_id(PREFIX), self._limits.file_bytes)

    def output(self, file_id: str) -> Upload:
        """Begin a file of the server's own, under an id that ``new_id`` made. It replaces an
        existing file with this id. Raises RequestError (507)."""
        return Upload(self, file_id, None)

    def add_bytes(self, num_bytes: int, *, is_limited: bool) -> None:
        """Count bytes of an upload. Raises RequestError (400) if all files together would be too
        large."""
        if is_limited and self._num_bytes + num_bytes > self._limits.total_bytes:
            raise RequestError(
                f"The files on this server would take more than {self._limits.total_bytes} bytes;"
                " delete some."
            )
        self._num_bytes += num_bytes

    def opened(self) -> None:
        self._num_uploads += 1

    def closed(self, file: StoredFile | None, num_bytes: int) -> None:
        """Note that an upload has ended: with a file, or with ``num_bytes`` that were removed."""
        self._num_uploads -= 1
        if file is None:
            self._num_bytes -= num_bytes
            return
        replaced = self._files.get(file.id)
        self._num_bytes -= 0 if replaced is None else replaced.num_bytes
        self._files[file.id] = file

    def save(self, file: StoredFile) -> None:
        """Store the description of a file whose content is stored already. Raises RequestError
        (507)."""
        self._documents.put(KIND, file)

    def _forget_expired(self) -> None:
        now = self.now()
        for file in list(self._files.values()):
            is_over = file.expires_at is not None and file.expires_at <= now
            if is_over and not self._held.get(file.id):
                self._remove(file)

    def _remove(self, file: StoredFile) -> None:
        # The document first: content without one is removed at the next start.
        self._documents.remove(KIND, file.id)
        self.path(file.id).unlink(missing_ok=True)
        del self._files[file.id]
        self._num_bytes -= file.num_bytes


class Upload:
    """A file that is being written; a context manager whose exit removes it unless it was finished.
    Enter and leave it on the event loop."""

    def __init__(self, store: UploadStore, file_id: str, max_bytes: int | None) -> None:
        self.num_bytes = 0
        self._store = store
        self._id = file_id
        self._max_bytes = max_bytes
        self._part = store.path(file_id + _PART)
        self._file: StoredFile | None = None

    def __enter__(self) -> Upload:
        try:
            self._out = open(self._part, "wb", opener=_private)
        except OSError as error:
            raise cannot_store(error.strerror or str(error)) from None
        self._store.opened()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._out.close()
        self._part.unlink(missing_ok=True)
        self._store.closed(self._file, self.num_bytes)

    async def write(self, data: bytes) -> None:
        """Write a piece. Raises RequestError: 413 for a file that is too large, 400 if all files
        together are, 507 for a disk that is full."""
        if self._max_bytes is not None and self.num_bytes + len(data) > self._max_bytes:
            raise RequestError(
                f"A file may have at most {self._max_bytes} bytes.",
                status_code=413,
            )
        self._store.add_bytes(len(data), is_limited=self._max_bytes is not None)
        self.num_bytes += len(data)
        try:
            await asyncio.to_thread(self._out.write, data)
        except OSError as error:
            raise cannot_store(error.strerror or str(error)) from None

    async def finish(
        self, *, filename: str, purpose: str, expires_after_s: int | None = None
    ) -> StoredFile:
        """Finish and return the file, which from then on survives a power cut. Raises RequestError
        (507)."""
        created_at = int(self._store.now())
        file = StoredFile(
            id=self._id,
            num_bytes=self.num_bytes,
            created_at=created_at,
            filename=filename,
            purpose=purpose,
            expires_at=None if expires_after_s is None else created_at + expires_after_s,
        )
        await asyncio.to_thread(self._save, file)
        self._file = file
        return file

    def _save(self, file: StoredFile) -> None:
        try:
            self._out.flush()
            os.fsync(self._out.fileno())
            os.replace(self._part, self._store.path(file.id))
            folder = os.open(self._part.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise cannot_store(error.strerror or str(error)) from None
        # Without its document the content is removed at the next start.
        self._store.save(file)


def _private(path: str, flags: int) -> int:
    """An opener of files that only their owner may read."""
    return os.open(path, flags, 0o600)
