"""Removes what other programs put around a line: container runtimes, log shippers and collectors.

Forms: docker compose and ``kubectl logs --prefix`` (a name first), the Kubernetes runtime's files
(time, stream, flag), docker's JSON files and structured loggers (the line is a value), journald and
syslog (time, host, unit), ``logging``'s usual format (time, level), and Ray (actor and process).
"""

from __future__ import annotations

import calendar
import re
from dataclasses import dataclass
from typing import Any

import msgspec

_KEYS = ("log", "message", "msg", "MESSAGE", "text", "line", "body", "textPayload")
_TIMES = ("time", "timestamp", "@timestamp", "ts", "datetime", "__REALTIME_TIMESTAMP")
_NAMES = ("container_name", "pod", "container", "service", "unit", "_SYSTEMD_UNIT")

STAMP = re.compile(
    rb"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d|(?<![\d:.-])\d\d:\d\d:\d\d(?![\d:]))"
    rb"(?:[.,](\d{1,9}))?(?:Z|[+-]\d\d:?\d\d\b)?"
)
"""A time of day with or without its date; the second group is the fraction."""

_NAME = rb"(?:[A-Za-z][\w./-]*)"
_LEADS = [
    re.compile(pattern)
    for pattern in (
        rb"(?P<name>" + _NAME + rb") *\| ",  # docker compose
        rb"\[(?P<name>(?:pod|container)/[\w./-]+)\] ",  # kubectl logs --prefix
        rb"(?P<stamp>\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d)) (?:stdout|stderr) [FP] ",
        rb"(?P<stamp>\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d)) ",  # docker logs --timestamps
        rb"\([A-Z]\w+ pid=\d+(?:, ip=[\w.:]+)?\) ",  # Ray
        rb"[\w.-]+ [\w.-]+ (?=\[[\dDTPg])",  # stern: pod, container
        rb"(?:DEBUG|INFO|WARNING|ERROR) +(?=\[[\dDTPg])",
        # Python's logging: time, level, perhaps the process and the logger
        rb"(?P<stamp>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?) (?:- )?"
        rb"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)(?: - | +)(?:\d+ +(?=\[))?"
        rb"(?:[a-z_]\w*(?:\.\w+)+(?: - |: | ))?",
        rb"(?P<stamp>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d) \S+ (?P<name>[\w@.-]+)(?:\[\d+\])?: ",
    )
]


@dataclass(slots=True, frozen=True)
class Unwrapped:
    """A line as the server wrote it."""

    text: bytes
    origin: str = ""
    """Name of the container, pod or unit that wrote it; "" if the wrapping does not say."""
    stamp: float | None = None
    """The time in the wrapping."""
    start: int | None = 0
    """Where the text begins in the wrapped line; None if it is not there byte by byte."""


def unwrap(line: bytes) -> Unwrapped:
    if line.startswith(b"{"):
        found = _from_json(line)
        if found is not None:
            return found
    start, origin, stamp = 0, "", None
    for _ in range(3):  # docker compose around a runtime's time, for instance
        match = next(filter(None, (lead.match(line, start) for lead in _LEADS)), None)
        if match is None:
            break
        groups = match.groupdict()
        if groups.get("name"):
            origin = groups["name"].decode(errors="replace")
        if groups.get("stamp"):
            stamp = seconds_of(groups["stamp"])
        start = match.end()
    return Unwrapped(line[start:], origin, stamp, start)


def _from_json(line: bytes) -> Unwrapped | None:
    try:
        fields = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    message = next((fields[key] for key in _KEYS if isinstance(fields.get(key), str)), None)
    if message is None:
        return None
    inner = unwrap(message.rstrip("\r\n").encode(errors="replace"))
    if inner.origin:
        origin = inner.origin
    else:
        names = (fields.get(key) for key in _NAMES)
        origin = next((name for name in names if isinstance(name, str)), "")
    stamp = next((at for key in _TIMES if (at := _when(fields.get(key))) is not None), None)
    start = line.find(inner.text[:24]) if inner.text else -1
    return Unwrapped(inner.text, origin, stamp, start if start >= 0 else None)


def _when(value: Any) -> float | None:
    if isinstance(value, str):
        return float(value) / 1e6 if value.isdigit() else seconds_of(value.encode())
    if isinstance(value, int | float) and not isinstance(value, bool):
        for unit in (1.0, 1e3, 1e6, 1e9):  # from seconds to nanoseconds
            if 1e9 <= value / unit < 1e10:
                return value / unit
    return None


_MONTHS = {name: number for number, name in enumerate(calendar.month_abbr) if name}


def seconds_of(text: bytes) -> float | None:
    """The seconds since 1970 (as if in UTC) of a time in ISO's or syslog's form; since midnight if
    it has no date; None if there is no time. Syslog's form has no year; 1970 is assumed."""
    found = STAMP.search(text)
    if found is None:
        return None
    stamp, fraction = found[1], found[2]
    try:
        if len(stamp) > 8:
            year, month, day = int(stamp[:4]), int(stamp[5:7]), int(stamp[8:10])
            days = _days(year, month, day)
        elif (month := _MONTHS.get(text[:3].decode(errors="replace"), 0)) and text[4:6].strip():
            days = _days(1970, month, int(text[4:6]))
        else:
            days = 0
    except ValueError:
        return None
    clock = stamp[-8:]
    second = int(clock[:2]) * 3600 + int(clock[3:5]) * 60 + int(clock[6:8])
    return days * 86400.0 + second + (float(b"0." + fraction) if fraction else 0.0)


def _days(year: int, month: int, day: int) -> int:
    if not (1 <= month <= 12 and 1 <= day <= 31 and year >= 1970):
        raise ValueError("no such day")
    return calendar.timegm((year, month, 1, 0, 0, 0)) // 86400 + day - 1
