"""What a JSON text would become, counted before it is decoded.

Decoding holds the interpreter's lock from the first byte to the last, and what it takes goes by the
things in the text, not by its bytes: 4 MiB of empty lists take 100 times as long as 4 MiB of prose.
So the things are counted first, at a few milliseconds for 4 MiB; then the longest that decoding can
take follows from the limits here. Numbers without exponent are not counted: 4 MiB of them take 30
ms.
"""

from __future__ import annotations

import numpy as np

MAX_PARTS = 1 << 17
"""Strings (keys too), lists and objects of a body."""

MAX_DEPTH = 100
"""Lists and objects around each other: what handles them calls itself, and Python's stack has an
end."""

MAX_EXPONENTS = 1000
"""Numbers written with an exponent: near the ends of the range of doubles the decoder needs up to
20 us for one."""

_BRACKETS = b"[]{}"
_OTHERS = bytes(byte for byte in range(256) if byte not in _BRACKETS)


def excess(text: bytes) -> str | None:
    """Which limit a body exceeds, in words for its sender; None if all is well. Need not be
    JSON."""
    quotes, opened, exponents = text.count(b'"'), _opened(text), _exponents(text)
    if quotes // 2 + opened <= MAX_PARTS and opened <= MAX_DEPTH and exponents <= MAX_EXPONENTS:
        return None  # even with what stands inside of strings
    if b"\\" in text:
        text = text.replace(rb"\\", b"").replace(rb"\"", b"")
        quotes = text.count(b'"')
    if quotes // 2 > MAX_PARTS:
        return _too_many_parts()
    outside = b"".join(text.split(b'"')[::2])
    if quotes // 2 + _opened(outside) > MAX_PARTS:
        return _too_many_parts()
    if _exponents(outside) - outside.count(b"true") - outside.count(b"false") > MAX_EXPONENTS:
        return f"has more than {MAX_EXPONENTS} numbers with an exponent"
    if _depth(outside) > MAX_DEPTH:
        return f"has more than {MAX_DEPTH} lists and objects inside each other"
    return None


def _too_many_parts() -> str:
    return f"has more than {MAX_PARTS} strings, lists and objects"


def _opened(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{")


def _exponents(text: bytes) -> int:
    return text.count(b"e") + text.count(b"E")


def _depth(outside: bytes) -> int:
    """Most brackets open at once. ``outside``: a text without its strings."""
    brackets = np.frombuffer(outside.translate(None, _OTHERS), np.uint8)
    steps = np.where((brackets == ord("[")) | (brackets == ord("{")), 1, -1)
    return int(np.cumsum(steps).max(initial=0))
