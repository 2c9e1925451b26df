"""Tells whether a large file still has the content that it had: by its SHA-256, which is noted in
the user's cache folder together with the file's state, so that an unchanged file is read once."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from io import BufferedReader
from pathlib import Path

import msgspec

from setpoint.core.errors import CheckpointError
from setpoint.core.progress import report

State = tuple[int, int, int, int]
"""A file's size, its times of the last change of content and of any change in ns, and its inode.
Together they change whenever the content does: the time of the last change cannot be set."""


class _Note(msgspec.Struct, frozen=True):
    path: str
    state: State
    digest: str


def cache_folder() -> Path:
    """Where converted models and these notes are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "setpoint" / "models"


def name_of_path(path: Path) -> str:
    """A file name for what is kept about this path."""
    return hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:16]


def state_of(file: BufferedReader) -> State:
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def noted_digest(path: Path, state: State) -> str | None:
    """The digest that was noted for a file in this state; None if there is none."""
    with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
        note = msgspec.json.decode(_note_of(path).read_bytes(), type=_Note)
        if (note.path, note.state) == (str(path.resolve()), state):
            return note.digest
    return None


def content_digest(path: Path, file: BufferedReader) -> str:
    """The SHA-256 of a file that is open, whose position is lost. Reading takes a second or two per
    GB unless the digest is noted. Raises CheckpointError if the file changes meanwhile."""
    try:
        state = state_of(file)
        if (noted := noted_digest(path, state)) is not None:
            return noted
        report(f"computing the digest of {path.name}")
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if state_of(file) != state:
            raise CheckpointError(f"{path} is being changed. Wait until it is complete.")
    except OSError as error:
        raise CheckpointError(f"Cannot read {path}: {error.strerror}.") from None
    with suppress(OSError):  # without a note, the file is read again next time
        note = _note_of(path)
        note.parent.mkdir(parents=True, exist_ok=True)
        draft = note.with_suffix(f".{os.getpid()}")
        draft.write_bytes(msgspec.json.encode(_Note(str(path.resolve()), state, digest)))
        draft.rename(note)
    return digest


def forget_missing() -> None:
    """Remove the notes about files that no longer exist."""
    for note in cache_folder().glob("*.digest"):
        with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
            if not Path(msgspec.json.decode(note.read_bytes(), type=_Note).path).exists():
                note.unlink(missing_ok=True)


def _note_of(path: Path) -> Path:
    return cache_folder() / f"{name_of_path(path)}.digest"
