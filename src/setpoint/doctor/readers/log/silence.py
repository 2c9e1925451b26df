"""Finds how a log continues after its last batch: a server that hangs still answers some
requests."""

from __future__ import annotations

import re
from collections.abc import Iterable

from setpoint.doctor.observations import Evidence, Silence
from setpoint.doctor.readers.log.wrapping import STAMP, seconds_of, unwrap

TAIL = 400
"""Lines at the end of a log that are looked at."""
LATER_S = 30.0
"""A request that arrives this long after the last batch cannot have been part of it."""
_LEAD = 80
"""Bytes at the beginning of a line that may hold its time."""
_DAY_S = 86400.0
_MOST_S = 30 * _DAY_S
_REQUEST = re.compile(rb'"POST /(?:v1/(?:chat/)?completions|v1/responses|v1/messages|generate)\b')

Clocks = tuple[float | None, float | None]
"""The time that the server itself writes, and that of its container or log collector: two clocks
that may be hours apart."""


def clocks_of(line: bytes) -> Clocks:
    wrapped = unwrap(line)
    stamp = STAMP.search(wrapped.text, 0, _LEAD)
    return (seconds_of(stamp.group()) if stamp else None), wrapped.stamp


def silence_after(batch: Clocks, lines: Iterable[tuple[int, bytes, str]]) -> Silence | None:
    """What follows the last batch; None if nothing does. lines: numbers, bytes and texts of the
    lines after it."""
    last: tuple[float, Evidence] | None = None
    requests = 0
    for number, line, text in lines:
        seconds = _between(batch, clocks_of(line))
        if seconds is None or not 0 < seconds < _MOST_S:
            continue
        last = seconds, Evidence(number, text)
        requests += seconds >= LATER_S and _REQUEST.search(line) is not None
    return None if last is None else Silence(last[0], last[1], requests)


def _between(earlier: Clocks, later: Clocks) -> float | None:
    """The seconds between two lines, by a clock that both have."""
    for one, other in zip(earlier, later, strict=True):
        if one is not None and other is not None:
            seconds = other - one
            return seconds + _DAY_S if seconds < 0 and other < _DAY_S else seconds
    return None
