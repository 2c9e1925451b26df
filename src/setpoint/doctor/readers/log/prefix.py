"""Makes the patterns of what precedes and follows the message of a batch line."""

from __future__ import annotations

import re

from setpoint.doctor.readers.log.wrapping import STAMP

_PLACE = rb"(?: [\w./-]+\.(?:py|cc|cpp):\d+)?"
"""The line of the code that wrote the message, which some loggers put after the rank."""
_RANK = re.compile(rb"((?: [A-Za-z_]+\d+)*)" + _PLACE + rb"\] ")
_ONE_RANK = re.compile(rb"\[((?:[A-Z_]+\d+ ?)+|gpu(?:_id)?=\d+)" + _PLACE + rb"\] ")


def prefix_pattern(lead: bytes, head: bytes) -> bytes:
    """The pattern of what precedes the message, with the groups stamp, fraction and rank."""
    stamps = list(STAMP.finditer(head))
    if stamps:
        last = stamps[-1]
        rank = _RANK.fullmatch(head, last.end())
        after = (
            rb"((?: [A-Za-z_]+[0-9]+)*)" + _PLACE + rb"\] "
            if rank
            else rb"()" + _general(head[last.end() :])
        )
        return _general(lead + head[: last.start()]) + stamp_pattern(last) + after
    stamp = next(STAMP.finditer(lead), None)
    if stamp is not None:
        before = (
            _general(lead[: stamp.start()]) + stamp_pattern(stamp) + _general(lead[stamp.end() :])
        )
    else:
        before = NO_STAMP + _general(lead)
    rank = next(_ONE_RANK.finditer(head), None)
    if rank:
        pattern = rb"\[([A-Z_]+\d+(?: [A-Z_]+\d+)*|gpu(?:_id)?=\d+)" + _PLACE + rb"\] "
        return before + _general(head[: rank.start()]) + pattern + _general(head[rank.end() :])
    return before + rb"()" + _general(head)


NO_STAMP = rb"()()"


def digits_pattern(text: bytes) -> bytes:
    """The text as a pattern in which all digits may change."""
    return re.sub(rb"\d+", rb"\\d+", re.escape(text))


def stamp_pattern(found: re.Match[bytes]) -> bytes:
    day = rb"[0-9]{4}-[0-9]{2}-[0-9]{2}[T ]" if len(found[1]) > 8 else b""
    fraction = rb"[.,](\d+)" if found[2] else rb"()"
    zone = rb"(?:Z|[+-]\d\d:?\d\d)?" if found.end() > found.end(2 if found[2] else 1) else b""
    return b"(" + day + rb"[0-9:]{8})" + fraction + zone


def _general(text: bytes) -> bytes:
    """The text as a pattern in which the digits of times and of line numbers may change. Digits of
    names may not, because they tell servers apart. In JSON all digits may change, and the remains
    of a progress bar may be anything."""
    if b"%|" in text:
        return rb".*?"
    if text.startswith(b"{"):
        return digits_pattern(text)
    parts, end = b"", 0
    for found in re.finditer(
        rb"\A\d+[:,-](?=[^\d\s]|\Z)|\d{4}-\d\d-\d\dT?|[ \d]\d \d\d:"
        rb"|\d\d:\d\d(?::\d\d)?(?:[.,]\d+)?|\[\d+\]",
        text,
    ):
        parts += re.escape(text[end : found.start()])
        parts += re.sub(rb"\d+", rb"\\d+", re.sub(rb"([.\[\]])", rb"\\\1", found.group())).replace(
            b" ", b" ?"
        )
        end = found.end()
    return parts + re.escape(text[end:])
