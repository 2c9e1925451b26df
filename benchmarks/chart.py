"""Draws a result file of benchmarks/compare.py: one panel per workload, a bar per contender, as an SVG for the README.

    python benchmarks/chart.py benchmarks/results/2026-11-21-peers.json docs/peers.svg

Bars are medians, whiskers the range of the repetitions, longer is better everywhere. Every colour can be read on white and on black.
Contenders that were skipped, or failed on a workload, are named with the reason; nothing is left out.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from contenders import Sample
from report import DECODE, OUTPUT, PREFILL, Metric, Report, number
from workloads import Workload

PANELS: Sequence[tuple[str, Metric]] = (("W1", DECODE), ("W2", OUTPUT), ("W3", OUTPUT), ("W4", PREFILL))
OURS = "setpoint"
TEXT, OUR_BAR, THEIR_BAR, WHISKER = "#7a7f87", "#1f7ae0", "#9aa3ad", "#c2571a"
"""Text has a contrast of about 4 to 1 on white and 5 to 1 on black."""
WIDTH, LABEL, VALUE, ROW, GAP = 860, 170, 70, 19, 34
FONT = "font-family='system-ui, sans-serif' font-size='12'"


def svg(record: dict[str, Any]) -> str:
    """The picture of one result file's content."""
    workloads = {each["name"]: Workload(**each) for each in record["workloads"]}
    results = {name: {who: [Sample(**one) for one in samples] for who, samples in by.items()} for name, by in record["samples"].items()}
    report, parts, top = Report(list(workloads.values()), results), [], GAP
    for name, metric in (each for each in PANELS if each[0] in workloads):
        precision = {who: record["contenders"][who]["precision"] for who in results[name]}
        values = {f"{who}, {precision[who]}": report.values(workloads[name], who, metric) for who in results[name]}
        title = f"{name}: {workloads[name].what} – {metric.name}, {metric.unit}"
        parts.append(text(0, top - 10, title, weight="bold"))
        parts += panel(values, top)
        top += ROW * len(values) + GAP
    notes = [f"{who}: skipped: {' '.join(reason.split())[:110]}" for who, reason in record["skipped"].items()]
    notes.append(f"{record['date']}, {record['machine']['cpu']}, {record['machine']['cpus']} CPUs, commit {record['commit']}")
    for note in notes:
        parts.append(text(0, top - 10, note))
        top += ROW
    size = f"viewBox='0 0 {WIDTH} {top - 10}' width='{WIDTH}' height='{top - 10}'"
    return f"<svg xmlns='http://www.w3.org/2000/svg' {size} {FONT} fill='{TEXT}'>\n" + "\n".join(parts) + "\n</svg>\n"


def panel(values: dict[str, list[float]], top: int) -> list[str]:
    """A row per contender, from ``top`` down."""
    longest = max((max(found) for found in values.values() if found), default=1.0)
    scale, parts = (WIDTH - LABEL - VALUE) / longest, []
    for row, (who, found) in enumerate(values.items()):
        y = top + row * ROW
        parts.append(text(LABEL - 8, y + 12, who, anchor="end", weight="bold" if who.startswith(OURS) else "normal"))
        if not found:
            parts.append(text(LABEL, y + 12, "failed"))
            continue
        middle, low, high = (scale * value for value in (statistics.median(found), min(found), max(found)))
        colour = OUR_BAR if who.startswith(OURS) else THEIR_BAR
        parts.append(f"<rect x='{LABEL}' y='{y + 2}' width='{middle:.1f}' height='{ROW - 6}' fill='{colour}'/>")
        line = f"x1='{LABEL + low:.1f}' x2='{LABEL + high:.1f}' y1='{y + 8.5}' y2='{y + 8.5}'"
        parts.append(f"<line {line} stroke='{WHISKER}' stroke-width='2'/>")
        parts.append(text(LABEL + max(middle, high) + 6, y + 12, number(statistics.median(found))))
    return parts


def text(x: float, y: float, words: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' font-weight='{weight}'>{escape(words)}</text>"


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    target.write_text(svg(json.loads(source.read_text())))
    print(f"written: {target}")


if __name__ == "__main__":
    main()
