"""Defines a metric series and a histogram's accumulator. ``catalogue`` declares the series."""

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
    """Where a series is counted. It determines the labels that the series has besides its own."""

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
    """The name with its namespace; a counter's name without the ending ``_total``."""
    kind: Kind
    scope: Scope
    help: str
    labels: tuple[str, ...] = ()
    """Labels of its own."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, without infinity."""

    @property
    def shown_name(self) -> str:
        return f"{self.name}_total" if self.kind is Kind.COUNTER else self.name


class Histogram:
    """Counts values by bucket. It takes a tenth of the time of the client library's histogram,
    which locks and searches for each value; tokens are counted one by one."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """bounds: ascending upper bounds, without infinity."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Number of values in each bucket, not cumulative; the last is for values above every
        bound."""
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value`` ``times`` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def snapshot(self) -> HistogramCounts:
        """The counts as a message; ``add`` takes it."""
        return {"counts": self.counts, "sum": self.sum}

    def add(self, snapshot: HistogramCounts) -> None:
        """Add the counts of a histogram with the same bounds."""
        self.counts = [a + b for a, b in zip(self.counts, snapshot["counts"], strict=True)]
        self.sum += snapshot["sum"]
