"""A list of moments of bounded length, however long the source is."""

from __future__ import annotations

from setpoint.core.moments import Moment, merge

CAPACITY = 4096


class Timeline:
    """Collects the moments of one rank in the order in which its source has them. Each kept moment
    stands for ``stride`` moments of the source; when ``CAPACITY`` moments are kept, neighbours are
    merged and the stride doubles. So the result depends only on the source, not on how it was
    cut up while it was read."""

    def __init__(self) -> None:
        self.stride = 1
        self._kept: list[Moment] = []
        self._in_last = 0  # moments of the source that the last kept one stands for

    @property
    def room(self) -> int:
        """How many moments of the source the next kept moment still takes; the caller may merge
        that many itself before it adds them."""
        return self.stride - self._in_last if self._in_last < self.stride else self.stride

    @property
    def free(self) -> int:
        """How many more moments it keeps before the stride doubles, with the open one."""
        return CAPACITY - len(self._kept) + (self._in_last < self.stride and bool(self._kept))

    def add(self, moment: Moment, count: int = 1) -> None:
        """Add a moment that stands for ``count`` moments of the source, at most ``room``."""
        if self._kept and self._in_last < self.stride:
            self._kept[-1] = merge([self._kept[-1], moment])
            self._in_last += count
            return
        if len(self._kept) == CAPACITY:
            pairs = zip(self._kept[::2], self._kept[1::2], strict=True)
            self._kept = [merge(pair) for pair in pairs]
            self.stride *= 2
        self._kept.append(moment)
        self._in_last = count

    def moments(self) -> list[Moment]:
        return list(self._kept)


def thinned(moments: list[Moment], most: int) -> list[Moment]:
    """At most this many moments (at least two): neighbours are merged, evenly."""
    while len(moments) > max(most, 2):
        moments = [merge(moments[at : at + 2]) for at in range(0, len(moments), 2)]
    return moments
