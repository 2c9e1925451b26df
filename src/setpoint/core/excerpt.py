"""Makes text from outside safe for a log line or a message: one line, printable, of bounded length.

Clients choose request ids, keys and model names. If these were logged unchanged, a line break could
begin a line that looks like the server's own, and a control sequence could reach the terminal of a
person who reads the log.
"""

from __future__ import annotations

IS_JSON = "is_json"
"""Attribute of a log record whose message is a whole line of JSON in ASCII, written as it is."""

_MAX_CHARS = 300
"""Most characters of an excerpt; the longest request id with its suffix fits."""


def printable(text: str) -> str:
    """``text`` with every unprintable character (line breaks, control and formatting characters)
    replaced by a Python escape."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def excerpt(text: str, max_chars: int = _MAX_CHARS) -> str:
    """``text`` as ``printable`` makes it, cut to ``max_chars`` characters. If it was cut, its full
    length is added."""
    if len(text) <= max_chars:
        return printable(text)
    return f"{printable(text[:max_chars])}… ({len(text)} characters)"


def quoted(text: str, max_chars: int = _MAX_CHARS) -> str:
    """Like ``excerpt``, in quotes as Python writes them. They escape what is unprintable already,
    so an excerpt must not be quoted a second time."""
    if len(text) <= max_chars:
        return repr(text)
    whole = repr(text[:max_chars])
    return f"{whole[:-1]}… ({len(text)} characters){whole[-1]}"
