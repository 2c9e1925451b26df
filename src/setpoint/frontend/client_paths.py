"""Bounds of the paths that clients name."""

from __future__ import annotations

from setpoint.core.errors import RequestError

MAX_PATH_CHARS = 1024
MAX_LEVELS = 64
"""Python makes missing folders by recursion, one call for each level."""
MAX_NAME_BYTES = 255
"""Longest name that Linux's file systems accept (NAME_MAX)."""


def check_path(path: str, name: str) -> None:
    """Raise RequestError (400) for a path that cannot be used: too long, too deep, or with
    characters that no file name has. name: the field that holds it."""
    levels = path.split("/")
    if len(path) > MAX_PATH_CHARS:
        raise RequestError(f"{name} must have at most {MAX_PATH_CHARS} characters.")
    if len(levels) > MAX_LEVELS:
        raise RequestError(f"{name} must have at most {MAX_LEVELS} levels of folders.")
    try:
        longest = max(len(level.encode()) for level in levels)
    except UnicodeEncodeError:  # half of a surrogate pair
        raise RequestError(f"{name} must not hold characters that no file name can have.") from None
    if longest > MAX_NAME_BYTES:
        raise RequestError(f"{name}: each name in it must have at most {MAX_NAME_BYTES} bytes.")
    if "\0" in path:
        raise RequestError(f"{name} must not hold characters that no file name can have.")
