"""Files that belong to this user alone. A path may be anything by the time it is opened: a link to
another place, a pipe that never answers, a file of another user. So what was opened is looked at,
no link in the last part of a path is followed, and nothing is waited for."""

from __future__ import annotations

import os
import stat
from pathlib import Path


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
