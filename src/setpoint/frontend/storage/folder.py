"""A folder that belongs to one server while it is open. What is in it is replaced whole or not at
all, so a crash at any moment leaves either the old content or the new one."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from setpoint.core.errors import ConfigError, RequestError

PART = ".part"
"""Suffix of what is being written; a server removes what it finds of that at its start."""
_ID_BYTES = 12


class Document(Protocol):
    @property
    def id(self) -> str:
        """The name of its file, without ``.json``."""
        ...


T = TypeVar("T", bound=Document)


def new_id(prefix: str) -> str:
    """An id that nobody can guess: ``prefix`` and 24 hexadecimal digits."""
    return f"{prefix}{secrets.token_hex(_ID_BYTES)}"


def is_id(name: str, prefix: str) -> bool:
    return re.fullmatch(rf"{prefix}[0-9a-f]{{{2 * _ID_BYTES}}}", name) is not None


class StorageFolder:
    """Holds the lock on a folder until it is closed or its process ends."""

    def __init__(self, path: Path) -> None:
        """Create the folder if it is missing, for its owner alone, and lock it. Raises ConfigError
        if that is impossible or another server uses it."""
        self.files, self.batches = path / "files", path / "batches"
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in (self.files, self.batches):
                folder.mkdir(mode=0o700, exist_ok=True)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(
                f"--file-storage-path {path} cannot be used: {error.strerror}."
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ConfigError(
                f"--file-storage-path {path} is in use by another server; each server needs a"
                " folder of its own."
            ) from None

    def close(self) -> None:
        os.close(self._lock)


def write_document(path: Path, document: msgspec.Struct) -> None:
    """Replace the file with the JSON of ``document``; returns when that would survive a power cut.
    Raises RequestError (507) if the disk is full or broken."""
    part = path.with_name(path.name + PART)
    try:
        with open(part, "wb", opener=private) as file:
            file.write(msgspec.json.encode(document))
            file.flush()
            os.fsync(file.fileno())
        move(part, path)
    except OSError as error:
        raise cannot_store(error) from None


def read_documents(folder: Path, prefix: str, kind: type[T]) -> tuple[list[T], list[Path]]:
    """The documents of a folder whose names are an id with ``prefix`` and ``.json``, and those of
    these files that hold no ``kind``."""
    documents: list[T] = []
    damaged: list[Path] = []
    for path in folder.glob(f"{prefix}*.json"):
        if is_id(path.stem, prefix):
            try:
                document: T | None = msgspec.json.decode(path.read_bytes(), type=kind)
            except (OSError, msgspec.DecodeError):
                document = None
            if document is None or document.id != path.stem:
                damaged.append(path)
            else:
                documents.append(document)
    return documents, damaged


def private(path: str, flags: int) -> int:
    """An opener of files that only their owner may read."""
    return os.open(path, flags, 0o600)


def move(source: Path, target: Path) -> None:
    """Rename a synced file; returns when the new name would survive a power cut."""
    os.replace(source, target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def cannot_store(error: OSError) -> RequestError:
    return RequestError(
        f"The server cannot write to its storage: {error.strerror}.",
        status_code=507,
        err_type="InsufficientStorage",
    )
