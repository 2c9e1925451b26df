"""Reads the license of a model from its files."""

from __future__ import annotations

from pathlib import Path

from setpoint.core.errors import CheckpointError

NAMES = ("LICENSE", "LICENSE.txt", "LICENSE.md")
GGUF_KEY = "general.license"
MAX_BYTES = 1 << 20
"""Longer files are no licenses, and are left out."""


def license_of(place: Path) -> str:
    """The text of the license file in a folder, or the name of the license that a GGUF file gives;
    "" if there is none, or it cannot be read."""
    try:
        if not place.is_dir():
            return _of_gguf(place)
        for path in (place / name for name in NAMES):
            if path.is_file() and path.stat().st_size <= MAX_BYTES:
                return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, CheckpointError):
        pass
    return ""


def _of_gguf(path: Path) -> str:
    # Only GGUF files need the gguf package.
    from setpoint.checkpoint.gguf.header import GGUFFile

    if not path.is_file():
        return ""
    with GGUFFile(path) as file:
        found = file.metadata.get(GGUF_KEY)
    return found if isinstance(found, str) else ""
