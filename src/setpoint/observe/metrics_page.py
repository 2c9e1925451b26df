"""Writes the tables of ``docs/metrics.md`` from the catalogue; a test compares the two. Run
``python -m setpoint.observe.metrics_page``."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from setpoint.observe.catalogue import SERIES
from setpoint.observe.series import COMMON_LABELS, Scope, Series

PATH = Path(__file__).parents[3] / "docs" / "metrics.md"
MARK = "<!-- The rest is written by `python -m setpoint.observe.metrics_page`. -->\n"

_TITLES = {
    Scope.SCHEDULER: "Series of the scheduler",
    Scope.REQUEST: "Series of requests",
    Scope.SERVER: "Series of the server",
}
_WHERE = {
    Scope.SCHEDULER: "Counted in the engine's process, from its records.",
    Scope.REQUEST: "Counted in the frontend, as the request's client saw it.",
    Scope.SERVER: "Counted in the frontend.",
}


def tables() -> str:
    """The Markdown of the tables: a section for each scope."""
    ordered = sorted(SERIES, key=lambda series: list(_TITLES).index(series.scope))
    return "".join(_section(scope, each) for scope, each in groupby(ordered, lambda s: s.scope))


def _section(scope: Scope, members: Iterable[Series]) -> str:
    common = ", ".join(f"`{label}`" for label in COMMON_LABELS[scope])
    labels = f" Labels of all: {common}." if common else ""
    head = "| series | type | own labels | meaning |\n|---|---|---|---|\n"
    rows = "".join(map(_row, members))
    return f"\n## {_TITLES[scope]}\n\n{_WHERE[scope]}{labels}\n\n{head}{rows}"


def _row(series: Series) -> str:
    labels = ", ".join(f"`{label}`" for label in series.labels)
    return f"| `{series.shown_name}` | {series.kind} | {labels} | {series.help} |\n"


def page(present: str) -> str:
    """The page ``present`` with its tables replaced."""
    written, mark, _ = present.partition(MARK)
    assert mark, f"{PATH} lacks the line {MARK!r}"
    return written + mark + tables()


if __name__ == "__main__":
    PATH.write_text(page(PATH.read_text(encoding="utf-8")), encoding="utf-8")
