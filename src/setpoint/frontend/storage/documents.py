"""Stores everything but the content of files: small documents, by kind and id, in one SQLite
database. While a server has the database open, no other server can use it."""

from __future__ import annotations

import logging
import os
import re
import secrets
import sqlite3
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from setpoint.core.errors import ConfigError, RequestError

logger = logging.getLogger(__name__)

NAME = "documents.sqlite3"
_ID_BYTES = 12


class Document(Protocol):
    @property
    def id(self) -> str: ...


T = TypeVar("T", bound=Document)


class Documents:
    """Safe for several threads. When a call returns, its change is completely on disk and survives
    a power cut."""

    def __init__(self, folder: Path) -> None:
        """Open or create the database of a folder; only its owner can read it. Raises ConfigError
        if that is impossible, or if another server uses it."""
        self._lock = threading.Lock()
        self._folder = folder
        try:
            os.close(os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o600))
            self._database = sqlite3.connect(
                folder / NAME, timeout=0, isolation_level=None, check_same_thread=False
            )
        except (OSError, sqlite3.Error) as error:
            raise _unusable(folder, error) from None
        try:
            # The first transaction locks the file, and the lock stays until the connection ends.
            self._database.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._database.execute("PRAGMA synchronous = EXTRA")
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS documents"
                " (kind TEXT, id TEXT, content BLOB, PRIMARY KEY (kind, id))"
            )
            self._database.execute("BEGIN EXCLUSIVE")
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            self._database.close()
            raise _unusable(folder, error) from None

    def close(self) -> None:
        """Close the database, so that another server can use the folder."""
        self._database.close()

    def all(self, kind: str, content: type[T]) -> list[T]:
        """The documents of a kind, the oldest first. A document that cannot be read is left out,
        with a warning."""
        rows = self._read("SELECT id, content FROM documents WHERE kind = ? ORDER BY rowid", kind)
        found: list[T] = []
        for own_id, text in rows:
            try:
                found.append(msgspec.json.decode(text, type=content))
            except (msgspec.DecodeError, TypeError):
                logger.warning("The stored %s %s is damaged; it is ignored.", kind, own_id)
        return found

    def ids(self, kind: str) -> set[str]:
        """The ids of all documents of a kind, including damaged ones."""
        return {
            own_id for own_id, _ in self._read("SELECT id, '' FROM documents WHERE kind = ?", kind)
        }

    def put(self, kind: str, document: Document) -> None:
        """Store a document, or replace the one with its id, which keeps its place. Raises
        RequestError (507) if the disk is full or broken."""
        self._run(*_putting(kind, document))

    def remove(self, kind: str, own_id: str) -> None:
        """Remove a document. Raises RequestError (507) if the disk is full or broken."""
        self._run(*_removing(kind, own_id))

    def change(self, kind: str, *, put: Iterable[Document], remove: Iterable[str]) -> None:
        """``put`` and ``remove`` several documents: all of them, or none. Raises RequestError
        (507)."""
        statements = [_putting(kind, document) for document in put]
        statements += [_removing(kind, own_id) for own_id in remove]
        try:
            with self._lock:
                self._database.execute("BEGIN")
                try:
                    for statement, *values in statements:
                        self._database.execute(statement, values)
                    self._database.execute("COMMIT")
                except sqlite3.Error:
                    if self._database.in_transaction:
                        self._database.execute("ROLLBACK")
                    raise
        except sqlite3.Error as error:
            raise cannot_store(str(error)) from None

    def _read(self, statement: str, kind: str) -> list[tuple[str, bytes]]:
        """Raises ConfigError: documents are read only when a server starts."""
        try:
            with self._lock:
                return self._database.execute(statement, [kind]).fetchall()
        except sqlite3.Error as error:
            raise _unusable(self._folder, error) from None

    def _run(self, statement: str, *values: str | bytes) -> None:
        try:
            with self._lock:
                self._database.execute(statement, values)
        except sqlite3.Error as error:
            raise cannot_store(str(error)) from None


def _putting(kind: str, document: Document) -> tuple[str, *tuple[str | bytes, ...]]:
    statement = (
        "INSERT INTO documents VALUES (?, ?, ?)"
        " ON CONFLICT DO UPDATE SET content = excluded.content"
    )
    return statement, kind, document.id, msgspec.json.encode(document)


def _removing(kind: str, own_id: str) -> tuple[str, *tuple[str | bytes, ...]]:
    return "DELETE FROM documents WHERE kind = ? AND id = ?", kind, own_id


def new_id(prefix: str) -> str:
    """An id that nobody can guess: ``prefix`` and 24 hexadecimal digits."""
    return f"{prefix}{secrets.token_hex(_ID_BYTES)}"


def is_id(name: str, prefix: str) -> bool:
    return re.fullmatch(rf"{prefix}[0-9a-f]{{{2 * _ID_BYTES}}}", name) is not None


def cannot_store(why: str) -> RequestError:
    return RequestError(
        f"The server cannot write to its storage: {why}.",
        status_code=507,
    )


def _unusable(folder: Path, error: OSError | sqlite3.Error) -> ConfigError:
    if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
        return ConfigError(
            f"--file-storage-path {folder} is in use by another server; each server needs a folder"
            " of its own."
        )
    why = error.strerror if isinstance(error, OSError) else f"{NAME}: {error}"
    return ConfigError(f"--file-storage-path {folder} cannot be used: {why}.")
