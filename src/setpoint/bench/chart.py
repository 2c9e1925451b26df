"""``bench serving --plot``: one run as four small charts. Output and running requests over time; how many first tokens came, and how
many gaps between tokens ended, within how many milliseconds.

Works on the records of a run, by ``svg``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from setpoint.bench import svg
from setpoint.bench.metrics import Run, concurrency, itls_s, token_times, ttft_s

WIDTH, HEIGHT = 420, 190
"""Of one chart, its margins included."""
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 34, 38
HEAD = 26
NUM_BINS = 80
MARKED = (50, 90, 99)
"""Percentiles."""

Points = Sequence[tuple[float, float]]


def serving_chart(run: Run, result: Mapping[str, Any]) -> str:
    """The SVG. ``result``: the figures of the same run, for the heading."""
    ttfts = [ttft_s(record) * 1e3 for record in run.good if record.times]
    itls = [gap * 1e3 for record in run.good for gap in itls_s(record)]
    title = (
        f"{result['backend']}, {result['dataset_name']}: {result['completed']} requests in {result['duration']:.1f} s, "
        f"{result['output_throughput']:,.0f} output tok/s"
    )
    failed = f", {result['failed']} failed" if result["failed"] else ""
    parts = [svg.text(0, 16, title + failed, weight="bold")]
    parts += _panel(0, 0, "Output tokens per second", _rate(run), "s")
    parts += _panel(1, 0, "Requests in flight", _steps(concurrency(run)), "s")
    parts += _panel(0, 1, "Time to first token: share of requests", _shares(ttfts), "ms", marks=_marks(ttfts))
    parts += _panel(1, 1, "Gap between tokens: share of gaps", _shares(itls), "ms", marks=_marks(itls))
    parts.append(svg.text(0, HEAD + 2 * HEIGHT + 14, str(result["date"])))
    return svg.document(parts, 2 * WIDTH, HEAD + 2 * HEIGHT + 20)


def _rate(run: Run) -> Points:
    times, weights = token_times(run)
    if not len(times):
        return []
    width = run.duration_s / NUM_BINS
    counts, edges = np.histogram(times, bins=NUM_BINS, range=(0.0, run.duration_s), weights=weights)
    return list(zip(((edges[:-1] + edges[1:]) / 2).tolist(), (counts / width).tolist(), strict=True))


def _steps(levels: Sequence[tuple[float, int]]) -> Points:
    """Level until the next change, with its corners."""
    points, before = [(0.0, 0.0)], 0.0
    for at, level in levels:
        points += [(at, before), (at, float(level))]
        before = float(level)
    return points if levels else []


def _shares(values: Sequence[float]) -> Points:
    """Value -> share of the values that are no larger, thinned to a few hundred points."""
    if not values:
        return []
    shares = np.linspace(0.0, 1.0, min(len(values), 300) + 1)
    return list(zip(np.quantile(values, shares).tolist(), shares.tolist(), strict=True))


def _marks(values: Sequence[float]) -> dict[str, tuple[float, float]]:
    """Percentiles, with their names."""
    found = np.percentile(values, MARKED).tolist() if values else []
    return {f"P{percent} {_number(value)}": (value, percent / 100) for percent, value in zip(MARKED, found, strict=bool(found))}


def _panel(
    column: int, row: int, title: str, points: Points, unit: str, *, marks: Mapping[str, tuple[float, float]] | None = None
) -> list[str]:
    left, top = column * WIDTH + LEFT, HEAD + row * HEIGHT + TOP
    right, bottom = (column + 1) * WIDTH - RIGHT, HEAD + (row + 1) * HEIGHT - BOTTOM
    parts = [svg.text(column * WIDTH, top - 12, title, weight="bold")]
    if not points:
        return [*parts, svg.text(left, top + 20, "nothing to show")]
    most_x, most_y = (_round_up(max(point[axis] for point in points)) for axis in (0, 1))

    def place(x: float, y: float) -> tuple[float, float]:
        return left + (right - left) * x / most_x, bottom - (bottom - top) * y / most_y

    for share in (0.0, 0.5, 1.0):
        y = place(0, share * most_y)[1]
        parts.append(svg.line([(left, y), (right, y)], svg.GREY, width=0.5))
        parts.append(svg.text(left - 6, y + 4, _number(share * most_y), anchor="end"))
        x = place(share * most_x, 0)[0]
        parts.append(svg.text(x, bottom + 16, f"{_number(share * most_x)} {unit}", anchor="end" if share == 1 else "middle"))
    parts.append(svg.line([place(*point) for point in points], svg.BLUE))
    for name, point in (marks or {}).items():
        x, y = place(*point)
        parts.append(svg.bar(x - 2.5, y - 2.5, 5, 5, svg.ORANGE))
        is_right = x > (left + right) / 2
        parts.append(svg.text(x - 8 if is_right else x + 8, y + 12, name, anchor="end" if is_right else "start"))
    return parts


def _round_up(value: float) -> float:
    """The next of 1, 2, 5, 10, 20, …"""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-9))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
