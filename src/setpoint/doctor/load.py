"""The part of a server's life under load as weighted moments, with statistics over them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from setpoint.core.moments import Moment
from setpoint.doctor.phases import lasted

Value = Callable[[Moment], float | None]
Test = Callable[[Moment], bool]


@dataclass(slots=True, frozen=True)
class Load:
    """Moments with the seconds that each stands for. Without a clock every moment weighs 1, and
    ``has_clock`` is False."""

    moments: tuple[Moment, ...] = ()
    weights: tuple[float, ...] = ()
    has_clock: bool = True

    def __len__(self) -> int:
        return len(self.moments)

    @property
    def seconds(self) -> float:
        """The duration of the load, summed over ranks; 0 without a clock."""
        return sum(self.weights) if self.has_clock else 0.0

    def where(self, test: Test) -> Load:
        kept = [
            (moment, weight)
            for moment, weight in zip(self.moments, self.weights, strict=True)
            if test(moment)
        ]
        return Load(tuple(m for m, _ in kept), tuple(w for _, w in kept), self.has_clock)

    def share(self, test: Test) -> float:
        """The share of the time in which the test holds; 0 if there is no time."""
        total = sum(self.weights)
        return sum(self.where(test).weights) / total if total else 0.0

    def mean(self, value: Value) -> float | None:
        pairs = self._known(value)
        weight = sum(w for _, w in pairs)
        return sum(v * w for v, w in pairs) / weight if weight else None

    def quantile(self, value: Value, share: float) -> float | None:
        """The least value that at least ``share`` of the time does not exceed."""
        pairs = sorted(self._known(value))
        if not pairs:
            return None
        left = share * sum(w for _, w in pairs)
        for each, weight in pairs:
            left -= weight
            if left <= 1e-9:
                return each
        return pairs[-1][0]

    def median(self, value: Value) -> float | None:
        return self.quantile(value, 0.5)

    def most(self, value: Value) -> float | None:
        return max((v for v, _ in self._known(value)), default=None)

    def trend(self, value: Value) -> float:
        """Mean of the last third divided by that of the first; 1 if nothing is known, large for a
        rise from zero."""
        known = [(v, w) for v, w in self._known(value)]
        third = len(known) // 3
        if not third:
            return 1.0
        first = sum(v for v, _ in known[:third]) / third
        last = sum(v for v, _ in known[-third:]) / third
        if first == last:
            return 1.0
        return min(last / first, 1000.0) if first > 0 else 1000.0

    def _known(self, value: Value) -> list[tuple[float, float]]:
        pairs = zip(self.moments, self.weights, strict=True)
        return [(v, w) for moment, w in pairs if (v := value(moment)) is not None]


def weigh(moments: Sequence[Moment], limit: float) -> list[float]:
    """Seconds that each moment stands for: a single line for the time since the line before, at
    most ``limit``, which lines of the same second share. Before a prefill into an empty server,
    nothing ran: it stands for the usual time between two lines."""
    weights = [lasted(moment) for moment in moments]
    gaps = [b.at - a.at for a, b in pairwise(moments) if b.at > a.at]
    usual = min(statistics.median(gaps), limit) if gaps else limit
    start = 0
    while start < len(moments):
        end = start + 1
        while end < len(moments) and moments[end].at <= moments[start].at:
            end += 1
        gap = moments[start].at - moments[start - 1].at if start else 0.0
        gap = min(max(gap, 0.0), usual if _begins(moments[start]) else limit)
        for index in range(start, end):
            if weights[index] <= 0:
                weights[index] = gap / (end - start)
        start = end
    return weights


def _begins(moment: Moment) -> bool:
    return moment.num_prefill > 0 and moment.num_decode == 0 and moment.running == 0
