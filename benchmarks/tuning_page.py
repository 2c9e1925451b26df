"""Writes the measured cells of docs/tuning.md from the newest result of benchmarks/tuning.py.

    python benchmarks/tuning_page.py

Measures nothing. A test generates the same cells and compares them with the page, so that no old
figure stays beside a newer result.
"""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

from report import Comparison as Ratio
from report import number
from tuning_knobs import FIGURES

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"
PAGE = REPOSITORY / "docs" / "tuning.md"
MARKED = re.compile(r"(<!-- measured: ([\w-]+) -->)(.*?)(<!-- end -->)", re.DOTALL)
MACHINE = "machine"
"""The mark of the sentences about the run."""
DISTURBED = 0.1
"""If other programs used at least this share of the machine's CPU time, the page says so."""


def newest_result() -> dict[str, Any]:
    """The latest result, with its path under "path"."""
    path = max(RESULTS.glob("*-tuning.json"))
    return json.loads(path.read_text()) | {"path": path.name}


def cell(record: dict[str, Any]) -> str:
    """One comparison in one line."""
    parts = [_figure(record, name) for name in record["figures"]]
    a, b = record["a"]["label"], record["b"]["label"]
    return f"{record['load']}; {record['knob']} {a} → {b}: {'; '.join(parts)}"


def _figure(record: dict[str, Any], name: str) -> str:
    a, b = ([sample[name] for sample in record["samples"][side]] for side in ("a", "b"))
    figure = FIGURES[name]
    before, after = statistics.median(a), statistics.median(b)
    unit = f" {figure.unit}" if figure.unit else ""
    text = f"{name} {number(before)} → {number(after)}{unit}"
    if before == after:
        return text
    if Ratio(b, a, figure.higher_is_better).in_the_noise:
        return f"{text} (within the noise)"
    return f"{text} ({after / before:.2g} ×)" if before else text


def about(result: dict[str, Any]) -> str:
    """The sentences about the run: date, commit, machine, turns and load."""
    machine, records = result["machine"], result["comparisons"]
    foreign = [
        sample["foreign_share"]
        for record in records
        for samples in record["samples"].values()
        for sample in samples
    ]
    turns = min(len(samples) for record in records for samples in record["samples"].values())
    levels = sorted({record["kernel_level"] for record in records})
    text = (
        f"{result['date']}, commit {result['commit']}, {machine['cpus']} virtual cores"
        f" ({machine['cpu']}, kernels at level {' and '.join(levels)}); each figure is the median"
        f" of {turns} turns; load average {machine['load_average_before']:.1f} before and"
        f" {result['load_average_after']:.1f} after the run;"
        f" [every sample](../benchmarks/results/{result['path']})."
    )
    used = statistics.median(foreign)
    if used > DISTURBED:
        text += (
            f" **The machine was loaded**: other programs used {used:.0%} of it in the median turn"
            f" (at most {max(foreign):.0%}), so the ratios are rough and the times are too long."
        )
    return text


def with_newest_result(page: str) -> str:
    """The page with the figures of the newest result. Raises KeyError for a mark without one."""
    result = newest_result()
    cells = {record["name"]: cell(record) for record in result["comparisons"]}
    cells[MACHINE] = about(result)
    return MARKED.sub(lambda found: found[1] + cells[found[2]] + found[4], page)


def marks(page: str) -> list[str]:
    return [found[1] for found in MARKED.findall(page)]


if __name__ == "__main__":
    PAGE.write_text(with_newest_result(PAGE.read_text()))
    print(f"written from {newest_result()['path']}: {PAGE.name}")
