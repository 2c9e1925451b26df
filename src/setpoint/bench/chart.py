"""``bench serving --plot``: one run as four small charts: output tokens and running requests over
time; and the share of first tokens, and of gaps between tokens, that took no more than a number of
milliseconds.

Works on the records of a run, and draws with ``svg``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from setpoint.bench import svg
from setpoint.bench.run_metrics import Run, concurrency, itls_s, token_times, ttft_s

WIDTH, HEIGHT = 420, 190
"""Size of one chart, including its margins."""
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 34, 38
HEAD = 26
NUM_BINS = 80
MARKED = (50, 90, 99)
"""Percentiles that are marked."""
FAR = 1.25
"""A distribution is drawn up to this multiple of the last marked percentile."""
STEPS = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)
"""Values at which an axis may end, times a power of ten."""

Points = Sequence[tuple[float, float]]


def serving_chart(run: Run, result: Mapping[str, Any]) -> str:
    """The charts as SVG. ``result``: the figures of the same run, for the heading."""
    ttfts = [ttft_s(record) * 1e3 for record in run.good if record.times]
    itls = [gap * 1e3 for record in run.good for gap in itls_s(record)]
    title = (
        f"{result['backend']}, {result['dataset_name']}: {result['completed']} requests in"
        f" {result['duration']:.1f} s, {result['output_throughput']:,.0f} output tok/s"
    )
    failed = f", {result['failed']} failed" if result["failed"] else ""
    parts = [svg.text(0, 16, title + failed, weight="bold")]
    parts += _panel(0, 0, "Output tokens per second", _rate(run), "s")
    parts += _panel(1, 0, "Requests in flight", _steps(concurrency(run)), "s")
    parts += _distribution(0, "Time to first token: share of requests", ttfts)
    parts += _distribution(1, "Gap between tokens: share of gaps", itls)
    parts.append(svg.text(0, HEAD + 2 * HEIGHT + 14, str(result["date"])))
    return svg.document(parts, 2 * WIDTH, HEAD + 2 * HEIGHT + 20)


def _rate(run: Run) -> Points:
    times, weights = token_times(run)
    if not len(times):
        return []
    width = run.duration_s / NUM_BINS
    counts, edges = np.histogram(times, bins=NUM_BINS, range=(0.0, run.duration_s), weights=weights)
    return list(
        zip(((edges[:-1] + edges[1:]) / 2).tolist(), (counts / width).tolist(), strict=True)
    )


def _steps(levels: Sequence[tuple[float, int]]) -> Points:
    """A line that stays level until the next change, with its corners."""
    points, before = [(0.0, 0.0)], 0.0
    for at, level in levels:
        points += [(at, before), (at, float(level))]
        before = float(level)
    return points if levels else []


def _distribution(column: int, title: str, values: Sequence[float]) -> list[str]:
    """Value -> share of the values that are no larger, in a few hundred points. The largest values
    may lie far outside, so the chart gives them in words."""
    if not values:
        return _panel(column, 1, title, [], "ms")
    shares = np.linspace(0.0, 1.0, 301)
    quantiles, limit = np.quantile(values, shares), FAR * float(np.percentile(values, 99))
    points = [
        (value, share)
        for value, share in zip(quantiles.tolist(), shares.tolist(), strict=True)
        if value <= limit
    ]
    found = np.percentile(values, MARKED).tolist()
    marks = {
        f"P{percent} {_number(value)}": (value, percent / 100)
        for percent, value in zip(MARKED, found, strict=True)
    }
    return _panel(
        column, 1, title, points, "ms", marks={**marks, f"longest {_number(max(values))}": None}
    )


def _panel(
    column: int,
    row: int,
    title: str,
    points: Points,
    unit: str,
    *,
    marks: Mapping[str, tuple[float, float] | None] | None = None,
) -> list[str]:
    """``marks``: text for the corner below a distribution, and the points that it names."""
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
        parts.append(
            svg.text(
                x,
                bottom + 16,
                f"{_number(share * most_x)} {unit}",
                anchor="end" if share == 1 else "middle",
            )
        )
    parts.append(svg.line([place(*point) for point in points], svg.BLUE))
    for index, (name, point) in enumerate((marks or {}).items()):
        parts.append(svg.text(right - 6, bottom - 60 + 16 * index, f"{name} {unit}", anchor="end"))
        if point is not None:
            x, y = place(*point)
            parts.append(svg.bar(x - 2.5, y - 2.5, 5, 5, svg.ORANGE))
    return parts


def _round_up(value: float) -> float:
    """The next larger of STEPS, times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in STEPS if step * power >= value * (1 - 1e-9))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
