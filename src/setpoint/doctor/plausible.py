"""Which figures can be: others are not understood, whoever says them, and nothing is advised from
them."""

from __future__ import annotations

import math

MAX_USAGE = 1.5
"""A share of a pool; some versions count what is reserved twice, so that it is a little above 1."""
MAX_FIGURE = 1e9
"""Requests, tokens at a time, and tokens per second of one server are fewer."""


def can_be(value: float, *, is_share: bool = False) -> bool:
    """Whether a gauge can have this value; is_share: it is the usage of a pool."""
    return math.isfinite(value) and 0 <= value <= (MAX_USAGE if is_share else MAX_FIGURE)
