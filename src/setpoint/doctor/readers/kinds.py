"""What a file is, by how it begins. It is asked of every file, so that nothing here imports a
reader."""

from __future__ import annotations

import re
from pathlib import Path

from setpoint.recording.frames import MARKER
from setpoint.recording.segments import segments_there

_PAGE = re.compile(
    rb"# (?:HELP|TYPE) |(?:sglang[:_]|setpoint:)[\w:]+(?:\{[^\n]*\})?[ \t]+[-+]?(?:\d|NaN|Inf)"
)
"""How a page of metrics begins: a comment, or a name with a number. Names of containers, which
stand before the lines of a log, begin like those of metrics."""


def is_recording(path: Path) -> bool:
    """Whether a file, or the oldest part of it that is left, begins like a recording."""
    if not path.exists():
        return path.parent.is_dir() and bool(segments_there(path))
    if not path.is_file():  # what is read from a pipe is gone
        return False
    with path.open("rb") as file:
        return file.read(len(MARKER)) == MARKER


def is_saved(path: Path) -> bool:
    """Whether a file begins like a page of metrics."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(4096).lstrip()
    return _PAGE.match(head) is not None
