"""Latencies that clients saw, of each of the last minutes' seconds: times to the first token, and
times between tokens. Cheap enough for every token of every server."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Iterable

KEPT_S = 660
STEP = 1.05
"""Values are told apart when one is this many times the other."""
_SCALE = 1.0 / math.log(STEP)
_LEAST_S = 1e-6
SHARES = (50, 95, 99)

Counts = Counter[int]
"""Values by the logarithm of their size."""


class Latencies:
    def __init__(self) -> None:
        self._epoch = time.time() - time.perf_counter()
        self._first: Counts = Counter()
        self._between: Counts = Counter()
        self._until = 0.0
        """When the present second ends, of the clock of ``time.perf_counter``."""
        self._seconds: deque[tuple[float, Counts, Counts]] = deque(maxlen=KEPT_S)
        """When each second began, since 1970, and what was counted in it; the present one, too."""

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
        self._between[_place(seconds)] += count

    def quantiles(self, at: float, seconds: float) -> dict[str, float]:
        """Of the seconds whose middle is in that time since 1970: "ttft_p50", "itl_p95", …; none
        without tokens."""
        found = [kept for kept in self._seconds if at <= kept[0] + 0.5 < at + seconds]
        return {
            **_quantiles("ttft", (first for _, first, _ in found)),
            **_quantiles("itl", (between for _, _, between in found)),
        }

    def _next_second(self, now: float) -> None:
        began = math.floor(now)
        self._until = began + 1.0
        self._first, self._between = Counter(), Counter()
        self._seconds.append((self._epoch + began, self._first, self._between))


def _place(seconds: float) -> int:
    return round(math.log(max(seconds, _LEAST_S)) * _SCALE)


def _quantiles(name: str, counted: Iterable[Counts]) -> dict[str, float]:
    counts: Counts = Counter()
    for each in counted:
        counts.update(each)
    total, seen, found = counts.total(), 0, {}
    shares = list(SHARES) if total else []
    for place in sorted(counts):
        seen += counts[place]
        while shares and seen >= shares[0] / 100 * total:
            found[f"{name}_p{shares.pop(0)}"] = math.exp(place / _SCALE)
    return found
