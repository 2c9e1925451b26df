"""Text that somebody else wrote, as it may stand in a log line: one line, printable, bounded.

A client chooses request ids, keys and model names. Written as they are, a line break in one would
begin a log line that looks like the server's own, and a control sequence would reach the terminal
of whoever reads the log.
"""

from __future__ import annotations

_MAX_CHARS = 300
"""Characters of a client's string that are shown; the longest request id, with its suffix, fits."""


def printable(text: str) -> str:
    """``text`` with every character that is not printable (line breaks, control and formatting
    characters) as a Python escape."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def shown(text: str, max_chars: int = _MAX_CHARS) -> str:
    """As ``printable``, and cut to ``max_chars`` characters; what was cut is said."""
    if len(text) <= max_chars:
        return printable(text)
    return f"{printable(text[:max_chars])}… ({len(text)} characters)"
