"""The chart of a run: its lines are the run's figures, in the scale of its axes."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from typing import Any

import pytest

from setpoint.bench import chart, svg
from setpoint.bench.request_record import Prompt, RequestRecord
from setpoint.bench.run_metrics import Run

SVG = "{http://www.w3.org/2000/svg}"
RESULT: dict[str, Any] = {
    "backend": "sglang",
    "dataset_name": "<random>",
    "completed": 2,
    "duration": 8.0,
    "output_throughput": 1234.5,
    "failed": 1,
    "date": "today",
}


def record(start: float, times: Sequence[float]) -> RequestRecord:
    return RequestRecord(
        Prompt("", 1, 1),
        started_at=start,
        ended_at=times[-1],
        times=list(times),
        counts=[1] * len(times),
        num_outputs=len(times),
    )


def drawn(run: Run) -> tuple[list[str], list[list[tuple[float, float]]]]:
    """Texts, and the curves in order."""
    root = ET.fromstring(chart.serving_chart(run, RESULT))
    lines = [line for line in root.iter(f"{SVG}polyline") if line.attrib["stroke"] == svg.BLUE]
    curves = [
        [
            (float(x), float(y))
            for x, y in (pair.split(",") for pair in line.attrib["points"].split())
        ]
        for line in lines
    ]
    return [str(each.text) for each in root.iter(f"{SVG}text")], curves


def test_curves_are_the_figures() -> None:
    run = Run([record(0.0, [1.0, 2.0, 8.0]), record(4.0, [6.0, 7.0])], 0.0, 8.0, 0.0)
    texts, (rate, flight, ttft, itl) = drawn(run)
    assert texts[0] == "sglang, <random>: 2 requests in 8.0 s, 1,234 output tok/s, 1 failed"
    assert "today" in texts
    inner = chart.WIDTH - chart.LEFT - chart.RIGHT
    high, low = chart.HEAD + chart.TOP, chart.HEAD + chart.HEIGHT - chart.BOTTOM
    assert len(rate) == chart.NUM_BINS
    assert sum(y < low for _, y in rate) == 5, "a bin per token"
    left = chart.WIDTH + chart.LEFT
    corners = [(x, y) for x, y in flight if y == pytest.approx(high)]
    assert [round((x - left) / inner * 8, 1) for x, _ in corners] == [
        4.0,
        7.0,
    ], "both run from 4 to 7 s of 8"
    assert (ttft[0][0] - chart.LEFT) / inner * 2000 == pytest.approx(1000, abs=6)
    assert (ttft[-1][0] - chart.LEFT) / inner * 2000 == pytest.approx(2000, abs=6)
    assert [x for x, _ in itl] == sorted(x for x, _ in itl)
    assert {"P50 1,500 ms", "P50 1,000 ms", "P99 1,990 ms", "longest 2,000 ms"} <= set(texts)


def test_a_far_end_is_in_words() -> None:
    run = Run(
        [record(0.0, [float(at) for at in range(1, 150)] + [1000.0, 1001.0])], 0.0, 1001.0, 0.0
    )
    texts, _ = drawn(run)
    assert {"longest 851,000 ms", "1,000 ms"} <= set(texts), "the axis ends at 1 s"


def test_a_run_of_failures_shows_nothing_and_says_so() -> None:
    bad = record(0.0, [1.0])
    bad.error = "status 500"
    texts, curves = drawn(Run([bad], 0.0, 1.0, 0.0))
    assert (texts.count("nothing to show"), curves) == (4, [])


@pytest.mark.parametrize(
    ("value", "up"), [(0, 1), (1, 1), (1.1, 1.2), (19.9, 20), (21, 25), (0.07, 0.08), (500.0, 500)]
)
def test_axes_end_at_round_numbers(value: float, up: float) -> None:
    assert chart._round_up(value) == pytest.approx(up)
