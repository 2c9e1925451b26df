"""Counts the values in a JSON text before it is decoded. Decoding holds the interpreter's lock from
the first byte to the last, and its time depends on the number of values, not of bytes: 4 MiB of
empty lists take 100 times as long as 4 MiB of prose. Counting takes a few milliseconds for 4 MiB,
and the limits here bound the time of decoding. Numbers without exponent are not counted: 4 MiB of
them take 30 ms.
"""

from __future__ import annotations

import numpy as np

MAX_PARTS = 1 << 17
"""Most strings (keys included), lists and objects in a body."""

MAX_DEPTH = 100
"""Most lists and objects nested in each other: the code that handles them is recursive, and
Python's stack is limited."""

MAX_EXPONENTS = 1000
"""Most numbers written with an exponent: near the limits of the range of doubles, the decoder needs
up to 20 us for one."""

_BRACKETS = b"[]{}"
_OTHERS = bytes(byte for byte in range(256) if byte not in _BRACKETS)


def excess(text: bytes) -> str | None:
    """Which limit a body exceeds, in words for its sender; None if it exceeds none. The body need
    not be valid JSON."""
    quotes, opened, exponents = text.count(b'"'), _opened(text), _exponents(text)
    if quotes // 2 + opened <= MAX_PARTS and opened <= MAX_DEPTH and exponents <= MAX_EXPONENTS:
        return None  # the counts include what is inside strings
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
    """The largest number of brackets open at once. outside: a text without its strings."""
    brackets = np.frombuffer(outside.translate(None, _OTHERS), np.uint8)
    steps = np.where((brackets == ord("[")) | (brackets == ord("{")), 1, -1)
    return int(np.cumsum(steps).max(initial=0))
