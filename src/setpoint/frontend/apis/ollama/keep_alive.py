"""Reads Ollama's ``keep_alive``: seconds, or a duration in Go's notation (``1h30m``)."""

from __future__ import annotations

import math
import re

from setpoint.core.errors import RequestError
from setpoint.core.excerpt import quoted

UNITS = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "μs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
}
"""https://pkg.go.dev/time#ParseDuration"""
_PART = re.compile(rf"(\d+\.?\d*|\.\d+)({'|'.join(UNITS)})")
_WHOLE = re.compile(rf"([+-]?)((?:{_PART.pattern})+|0)")


def keep_seconds(value: float | str | None) -> float:
    """The seconds for which a model stays loaded; infinite for None and for what is less than 0.
    Raises RequestError (400) for a text that is no duration."""
    if value is None:
        return math.inf
    seconds = _duration(value) if isinstance(value, str) else value
    return math.inf if seconds < 0 else seconds


def _duration(text: str) -> float:
    if re.fullmatch(r"-?\d{1,15}", text):  # clients send whole seconds as text, too
        return float(text)
    found = _WHOLE.fullmatch(text) if len(text) <= 64 else None
    if found is None:
        raise RequestError(
            f'keep_alive must be a number of seconds or a duration such as "5m", got'
            f" {quoted(text, 64)}."
        )
    total = sum(float(number) * UNITS[unit] for number, unit in _PART.findall(found[2]))
    return -total if found[1] == "-" else total
