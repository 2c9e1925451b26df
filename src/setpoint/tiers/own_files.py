"""Folders of a cache that belong to this user alone (see ``core.own_files``)."""

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


def claim_parts(folder: Path) -> None:
    """Make the three folders of a cache, or make sure of them. The blocks' is the first, because a
    folder that has one of the others without it is taken for that of something else. Raises
    StoreError and OSError as ``claim_folder`` does."""
    for name in ("blocks", "new", "index"):
        claim_folder(folder / name)


def remove(path: Path) -> None:
    """Remove a file, or whatever stands in its place; a link, not what it leads to."""
    try:
        path.unlink()
    except IsADirectoryError:
        shutil.rmtree(path, ignore_errors=True)
    except OSError:
        pass
