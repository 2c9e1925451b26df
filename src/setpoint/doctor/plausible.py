"""Tells possible figures from impossible ones, which are ignored whatever source they come from."""

from __future__ import annotations

import math

MAX_USAGE = 1.5
"""Largest share of a pool that is possible. Some versions count reserved memory twice, so that it
is a little above 1."""
MAX_FIGURE = 1e9
"""No server has so many requests, tokens at a time, or tokens per second."""


def is_possible(value: float, *, is_share: bool = False) -> bool:
    """Whether a gauge can have this value. is_share: it is the usage of a pool."""
    return math.isfinite(value) and 0 <= value <= (MAX_USAGE if is_share else MAX_FIGURE)
