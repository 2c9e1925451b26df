"""Draws one chart of the page: paths in SVG, which are stretched to the page's width, and labels
around them, which are not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from setpoint.doctor.report.figures import Charts, Figure, Points, Reading, pieces, vertices
from setpoint.doctor.report.wording import number, of_figure, printable

_WIDTH, _HEIGHT = 1000.0, 200.0
"""Units of the drawing; the page decides how large they are."""
_COLUMNS = 320
"""Points of a line: as many as a wide screen can show."""
_LETTER = 0.016
"""Share of the chart that a phase needs for each letter of its name."""


def chart(figure: Figure, charts: Charts) -> str:
    labels = [
        f'<span class="y" style="top:{100 - 100 * share:g}%">{escape(_axis(figure, share))}</span>'
        for share in (0.0, 0.5, 1.0)
    ]
    labels += [
        f'<span class="x" style="left:{100 * place:.2f}%">{escape(name)}</span>'
        for place, name in charts.ticks()
    ]
    for span in charts.phases:
        first, last = span.start / charts.seconds, span.end / charts.seconds
        if last - first >= _LETTER * len(span.phase):
            style = f"left:{100 * first:.2f}%;width:{100 * (last - first):.2f}%"
            labels.append(f'<span class="phase" style="{style}">{escape(span.phase)}</span>')
    labels += [
        f'<span class="flag" style="left:{100 * at / charts.seconds:.2f}%">▲</span>'
        for at in charts.marks.values()
    ]
    if figure.drawn_limit is not None:
        top = 100 - 100 * figure.drawn_limit / figure.top
        name = f"{figure.limit_name} {number(figure.drawn_limit)}"
        labels.append(f'<span class="cap" style="top:{top:.2f}%">{escape(name)}</span>')
    return (
        f"<figure><figcaption><b>{escape(figure.title)}</b>"
        f"<span>{escape(of_figure(figure, charts))}</span></figcaption>"
        f'<div class="plot"><svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" preserveAspectRatio="none"'
        f' role="img" aria-label="{escape(figure.title)} over time">'
        f"{''.join(_shapes(figure, charts))}</svg>{''.join(labels)}</div>"
        f'<div class="under"></div></figure>'
    )


def _axis(figure: Figure, share: float) -> str:
    return number(share * figure.top) + (f" {figure.unit}" if figure.unit == "%" else "")


def _shapes(figure: Figure, charts: Charts) -> Iterator[str]:
    for span in charts.phases:
        x, end = (_x(at, charts) for at in (span.start, span.end))
        yield (
            f'<rect class="{escape(span.phase)}" x="{x:.1f}" y="0" width="{end - x:.1f}"'
            f' height="{_HEIGHT:g}"/>'
        )
    for share in (0.0, 0.5, 1.0):
        y = _HEIGHT * share
        yield f'<line class="grid" x1="0" x2="{_WIDTH:g}" y1="{y:g}" y2="{y:g}"/>'
    for line, at in sorted(charts.marks.items()):
        x = _x(at, charts)
        yield (
            f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{_HEIGHT:g}">'
            f"<title>line {line:,}</title></line>"
        )
    column = charts.seconds / _COLUMNS
    for rank, readings in figure.lines.items():
        title = f"<title>{escape(printable(rank))}</title>" if rank else ""
        if figure.bars:
            yield f'<path class="bar" d="{_bars(readings, figure, charts)}">{title}</path>'
            continue
        for piece in pieces(readings, column):
            means, band = _line(vertices(piece, column), figure, charts)
            if len(figure.lines) == 1:
                yield f'<path class="band" d="{band}"/>'
            yield f'<path class="stroke" d="{means}">{title}</path>'
    if figure.drawn_limit is not None:
        y = _y(figure.drawn_limit, figure)
        yield f'<line class="limit" x1="0" x2="{_WIDTH:g}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _line(points: Points, figure: Figure, charts: Charts) -> tuple[str, str]:
    """The path of the means, and the area between the lowest and the highest values, each over
    columns of time."""
    columns: dict[int, list[tuple[float, float]]] = {}
    for at, value in points:
        columns.setdefault(int(at / charts.seconds * _COLUMNS), []).append((at, value))
    means, tops, floors = [], [], []
    for inside in columns.values():
        x = _x(sum(at for at, _ in inside) / len(inside), charts)
        values = [value for _, value in inside]
        means.append(f"{x:.1f} {_y(sum(values) / len(values), figure):.1f}")
        tops.append(f"{x:.1f} {_y(max(values), figure):.1f}")
        floors.append(f"{x:.1f} {_HEIGHT:g}")
    if len(means) == 1:
        means *= 2  # a path to where it is, which its round ends make a dot
    return f"M{'L'.join(means)}", f"M{'L'.join(tops + floors[::-1])}Z"


def _bars(readings: Iterable[Reading], figure: Figure, charts: Charts) -> str:
    return "".join(
        f"M{_x(reading.at, charts):.1f} {_HEIGHT:g}V{_y(reading.value, figure):.1f}"
        for reading in readings
        if reading.value > 0
    )


def _x(at: float, charts: Charts) -> float:
    return _WIDTH * at / charts.seconds


def _y(value: float, figure: Figure) -> float:
    return _HEIGHT * (1 - min(max(value / figure.top, 0.0), 1.0))
