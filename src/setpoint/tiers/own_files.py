"""Careful ways to use the files of a cache. A path may be anything by the time it is opened: a link
to another place, a pipe that never answers, a file of another user. All here look at what they have
opened, follow no link in the last part of a path, and wait for nothing."""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from setpoint.tiers.store import StoreError


def claim_folder(path: Path, *, parents: bool = False) -> None:
    """Make a folder that is this user's alone, or make sure that it is. Raises StoreError if it is
    not, OSError if it cannot be made."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=parents)
    about = path.lstat()
    if stat.S_ISLNK(about.st_mode):
        raise StoreError(f"{path} is a symbolic link. Name the folder itself to which it leads.")
    if not stat.S_ISDIR(about.st_mode):
        raise StoreError(f"The folder {path} cannot be used for the cache: it is no folder.")
    if about.st_uid != os.geteuid():
        raise StoreError(
            f"The folder {path} belongs to another user (number {about.st_uid}). A cache must be"
            " written by nobody else; name another folder."
        )
    if about.st_mode & 0o022:
        raise StoreError(
            f"Other users may write to the folder {path}. A cache must be written by nobody else:"
            f" chmod go-w {path}"
        )


def is_own_file(about: os.stat_result) -> bool:
    """Whether this is a plain file of this user, to which nobody else may write."""
    return (
        stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o022
    )


def open_own(path: Path) -> int | None:
    """A descriptor to read a file; None if what is there is no plain file of this user alone.
    Raises OSError, also if nothing is there."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        if is_own_file(path.lstat()):
            raise
        return None
    if is_own_file(os.fstat(descriptor)):
        return descriptor
    os.close(descriptor)
    return None


def remove(path: Path) -> None:
    """Remove a file, or whatever stands in its place; a link, not what it leads to."""
    try:
        path.unlink()
    except IsADirectoryError:
        shutil.rmtree(path, ignore_errors=True)
    except OSError:
        pass
