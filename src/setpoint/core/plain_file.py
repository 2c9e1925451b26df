"""Plain files that a person has named. A name may be anything: a pipe that nobody writes to, a
device without an end. So nothing is waited for, and what was opened is looked at before it is read.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

SETTINGS_MIB = 1
"""The limit of a file that a person has written: settings, a template."""


def open_at_once(path: str, flags: int) -> int:
    """Open a file, also a pipe without a writer, without waiting; an ``opener`` for Python."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def read_plain(path: str | Path, most_mib: int) -> bytes:
    """The bytes of a plain file, which may have so many MiB. Raises OSError, whose ``strerror`` is
    for people."""
    most, parts, size = most_mib << 20, [], 0
    try:
        with open(path, "rb", buffering=0, opener=open_at_once) as file:
            about = os.fstat(file.fileno())
            is_fit = stat.S_ISREG(about.st_mode) and about.st_size <= most
            while is_fit and (part := file.read(1 << 20)):
                parts.append(part)
                size += len(part)
                is_fit = size <= most  # it may grow, and the size of a file of the system is 0
    except ValueError:  # a zero, or half a surrogate pair
        raise OSError(errno.EINVAL, "no file can have this name") from None
    except IsADirectoryError:
        is_fit = False
    if not is_fit:
        raise OSError(errno.EINVAL, f"it must be a plain file of at most {most_mib} MiB")
    return b"".join(parts)
