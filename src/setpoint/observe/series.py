"""What a metric series is, and the accumulators behind one. ``catalogue`` declares the series."""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from setpoint.core.control import HistogramCounts


class Kind(enum.StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Scope(enum.StrEnum):
    """Who counts a series, which decides about the labels that it has besides its own."""

    SCHEDULER = "scheduler"  # the engine's process, from its records
    REQUEST = "request"  # the frontend, as the request's client saw it
    SERVER = "server"  # the frontend; no further labels


COMMON_LABELS = {
    Scope.SCHEDULER: ("model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank"),
    Scope.REQUEST: ("model_name", "engine_type"),
    Scope.SERVER: (),
}


@dataclass(slots=True, frozen=True)
class Series:
    """One metric, as Prometheus shows it."""

    name: str
    """With its namespace; a counter's without the ending ``_total``."""
    kind: Kind
    scope: Scope
    help: str
    labels: tuple[str, ...] = ()
    """Labels of its own, at most one for a series of the scheduler."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, without infinity."""

    @property
    def shown_name(self) -> str:
        return f"{self.name}_total" if self.kind is Kind.COUNTER else self.name


class Histogram:
    """Counts values by bucket. A tenth of the price of the client library's, which locks and
    searches for each value; tokens are counted one by one."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """bounds: ascending upper bounds, without infinity."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Values in each bucket alone; the last has those above every bound."""
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value`` as often as ``times`` says."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def plain(self) -> HistogramCounts:
        """The counts, for a message; ``add`` takes them."""
        return {"counts": self.counts, "sum": self.sum}

    def add(self, plain: HistogramCounts) -> None:
        """Add the counts of a histogram with the same bounds."""
        self.counts = [a + b for a, b in zip(self.counts, plain["counts"], strict=True)]
        self.sum += plain["sum"]
