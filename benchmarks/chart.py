"""Draws a result file of benchmarks/compare.py: one panel per workload, a bar per contender, as an
SVG for the README.

    python benchmarks/chart.py benchmarks/results/2026-11-22-peers.json docs/peers.svg

Bars are medians, and whiskers the range of the repetitions; longer is better everywhere. Contenders
that were skipped, or failed on a workload, are named with the reason; nothing is left out.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contenders import Sample
from report import DECODE, OUTPUT, PREFILL, Metric, Report, number
from workloads import Workload

from setpoint.bench import svg

PANELS: Sequence[tuple[str, Metric]] = (
    ("W1", DECODE),
    ("W2", OUTPUT),
    ("W3", OUTPUT),
    ("W4", PREFILL),
)
OURS = "setpoint"
WIDTH, VALUE, ROW, GAP = 860, 70, 19, 34
CHARACTER = 7.2
"""The mean width of a bold character, rounded up."""


def chart(record: dict[str, Any]) -> str:
    """The picture of one result file's content."""
    workloads = {each["name"]: Workload(**each) for each in record["workloads"]}
    results = {
        name: {who: [Sample(**one) for one in samples] for who, samples in by.items()}
        for name, by in record["samples"].items()
    }
    report, parts, top = Report(list(workloads.values()), results), [], GAP
    for name, metric in (each for each in PANELS if each[0] in workloads):
        labels = {
            who: ", ".join(filter(None, (who, record["contenders"][who]["precision"])))
            for who in results[name]
        }
        values = {
            label: report.values(workloads[name], who, metric) for who, label in labels.items()
        }
        title = f"{name}: {workloads[name].what} – {metric.name}, {metric.unit}"
        parts.append(svg.text(0, top - 10, title, weight="bold"))
        parts += panel(values, top)
        top += ROW * len(values) + GAP
    notes = [
        f"{who}: skipped: {' '.join(reason.split())[:110]}"
        for who, reason in record["skipped"].items()
    ]
    notes.append("bar: median; line: lowest to highest")
    notes.append(
        f"{record['date']}, {record['machine']['cpu']}, {record['machine']['cpus']} CPUs, commit"
        f" {record['commit']}"
    )
    for note in notes:
        parts.append(svg.text(0, top - 10, note))
        top += ROW
    return svg.document(parts, WIDTH, top - 10)


def panel(values: dict[str, list[float]], top: int) -> list[str]:
    """A row per contender, from ``top`` down."""
    longest = max((max(found) for found in values.values() if found), default=1.0)
    begin = CHARACTER * max(map(len, values)) + 8
    scale, parts = (WIDTH - begin - VALUE) / longest, []
    for row, (who, found) in enumerate(values.items()):
        y = top + row * ROW
        parts.append(
            svg.text(
                begin - 8,
                y + 12,
                who,
                anchor="end",
                weight="bold" if who.startswith(OURS) else "normal",
            )
        )
        if not found:
            parts.append(svg.text(begin, y + 12, "failed"))
            continue
        middle, low, high = (
            scale * value for value in (statistics.median(found), min(found), max(found))
        )
        parts.append(
            svg.bar(begin, y + 2, middle, ROW - 6, svg.BLUE if who.startswith(OURS) else svg.GREY)
        )
        parts.append(
            svg.line([(begin + low, y + 8.5), (begin + high, y + 8.5)], svg.ORANGE, width=2)
        )
        parts.append(
            svg.text(begin + max(middle, high) + 6, y + 12, number(statistics.median(found)))
        )
    return parts


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    target.write_text(chart(json.loads(source.read_text())))
    print(f"written: {target}")


if __name__ == "__main__":
    main()
