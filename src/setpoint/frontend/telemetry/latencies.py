"""Latencies that clients saw, of each of the last minutes' seconds: times to the first token, and
times between tokens. Cheap enough for every token of every server."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable
from math import exp, floor, log

KEPT_S = 660
SHARES = (50, 95, 99)
LEAST_S, MOST_S = 1e-6, 1e6
"""Smaller and larger values count as these."""
STEP = 1.05
"""Values are told apart when one is this many times the other."""
_SCALE = 1.0 / log(STEP)
_OFFSET = -log(LEAST_S) * _SCALE + 0.5
_PLACES = int(log(MOST_S) * _SCALE + _OFFSET) + 1

Counts = dict[int, int]
"""Values by the place of their logarithm; places without values are left out."""


class Latencies:
    def __init__(self) -> None:
        self._epoch = time.time() - time.perf_counter()
        self._first = [0] * _PLACES
        """Counts by place of the present second, like the next attribute."""
        self._between = [0] * _PLACES
        self._until = float("-inf")
        """When the present second ends, of the clock of ``time.perf_counter``."""
        self._seconds: deque[tuple[float, Counts, Counts]] = deque(maxlen=KEPT_S)
        """Seconds with tokens before the present one: when each began, since 1970, and what was
        counted in it."""

    def first(self, seconds: float, now: float) -> None:
        """A sequence's first token came at ``now`` (``time.perf_counter``), so long after its
        request."""
        if now >= self._until:
            self._next_second(now)
        self._first[_place(seconds)] += 1

    def between(self, seconds: float, count: int, now: float) -> None:
        """``count`` further tokens came at ``now``, so long after one another."""
        if now >= self._until:
            self._next_second(now)
        # As _place, without the price of a call for each token.
        clipped = LEAST_S if seconds < LEAST_S else seconds if seconds < MOST_S else MOST_S
        self._between[int(log(clipped) * _SCALE + _OFFSET)] += count

    def quantiles(self, at: float, seconds: float) -> dict[str, float]:
        """The quantiles ("ttft_p50", "itl_p95", …) of the seconds whose middle is in that time,
        given in seconds since 1970; none without tokens."""
        found = []
        for kept in (self._present(), *reversed(self._seconds)):
            if kept[0] + 0.5 < at:
                break
            if kept[0] + 0.5 < at + seconds:
                found.append(kept)
        return {
            **_quantiles("ttft", (first for _, first, _ in found)),
            **_quantiles("itl", (between for _, _, between in found)),
        }

    def _present(self) -> tuple[float, Counts, Counts]:
        return self._epoch + self._until - 1.0, _counts(self._first), _counts(self._between)

    def _next_second(self, now: float) -> None:
        if self._until > float("-inf"):
            self._seconds.append(self._present())
        self._until = floor(now) + 1.0
        self._first, self._between = [0] * _PLACES, [0] * _PLACES


def _place(seconds: float) -> int:
    return int(log(min(max(seconds, LEAST_S), MOST_S)) * _SCALE + _OFFSET)


def _counts(places: list[int]) -> Counts:
    return {place: count for place, count in enumerate(places) if count}


def _quantiles(name: str, counted: Iterable[Counts]) -> dict[str, float]:
    counts: Counter[int] = Counter()
    for each in counted:
        counts.update(each)
    total, seen, found = counts.total(), 0, {}
    shares = list(SHARES) if total else []
    for place in sorted(counts):
        seen += counts[place]
        while shares and seen >= shares[0] / 100 * total:
            found[f"{name}_p{shares.pop(0)}"] = exp((place - _OFFSET + 0.5) / _SCALE)
    return found
