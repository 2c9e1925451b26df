"""Blocks as files of a folder that several machines have mounted, such as 3FS. Unlike
``file_store`` it keeps no index, which such file systems would not share: whether a block is there
is asked of the folder. How bytes are read and written is the part of a ``FileIO``."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from setpoint.core.own_files import open_own
from setpoint.tiers.own_files import claim_folder
from setpoint.tiers.store import StoreError

STALE_S = 600.0
"""Age from which a file that is being written belongs to a process that has ended."""


class FileIO(Protocol):
    """Reads and writes whole files, whose descriptors it is given."""

    def read(self, descriptor: int, size: int) -> bytes | memoryview: ...

    def write(self, descriptor: int, data: bytes) -> None: ...

    def close(self) -> None: ...


class PosixIO:
    """The calls of the operating system."""

    def read(self, descriptor: int, size: int) -> bytes:
        parts = []
        while size > 0 and (part := os.read(descriptor, size)):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def write(self, descriptor: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]

    def close(self) -> None:
        """There is nothing to do."""


class FolderClient:
    """Implements ``remote_store.Client``."""

    def __init__(self, folder: Path, io: FileIO) -> None:
        """folder: is made; the folder in which it is must be there. Raises StoreError."""
        self.place = str(folder)
        self._folder, self._io = folder, io
        try:
            claim_folder(folder)
        except OSError as error:
            raise StoreError(
                f"the folder {folder} cannot be used: {error.strerror or error}."
            ) from None

    def check(self) -> None:
        probe = self._new_path()
        for path in self._folder.glob("new-*"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > STALE_S:
                    path.unlink()
        try:
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise StoreError(
                f"the folder {self._folder} cannot be written: {error.strerror or error}."
            ) from None

    def num_leading(self, names: Sequence[str]) -> int:
        return next(
            (index for index, name in enumerate(names) if not self._path(name).exists()), len(names)
        )

    def get(self, name: str) -> bytes | memoryview | None:
        return self._read(name, None)

    def head(self, name: str, size: int) -> bytes | None:
        found = self._read(name, size)
        return None if found is None else bytes(found)

    def put(self, name: str, value: bytes) -> bool:
        path, new = self._path(name), self._new_path()
        try:
            descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                self._io.write(descriptor, value)
            finally:
                os.close(descriptor)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            new.replace(path)
        except BaseException:
            with suppress(OSError):
                new.unlink()
            raise
        return True

    def remove(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)

    def names(self) -> Iterator[tuple[str, int]]:
        found = []
        for path in self._folder.glob("??/*.kv"):
            with suppress(OSError):
                about = path.stat()
                found.append((about.st_mtime, path.stem, about.st_size))
        for _, name, size in sorted(found):
            yield name, size

    def close(self) -> None:
        self._io.close()

    def _read(self, name: str, size: int | None) -> bytes | memoryview | None:
        try:
            descriptor = open_own(self._path(name))
        except FileNotFoundError:
            return None
        if descriptor is None:
            return None
        try:
            return self._io.read(descriptor, size or os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)

    def _path(self, name: str) -> Path:
        return self._folder / name[:2] / f"{name}.kv"

    def _new_path(self) -> Path:
        return self._folder / f"new-{uuid.uuid4()}"
