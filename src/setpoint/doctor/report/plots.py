"""Plots figures over time with characters: braille if the terminal has it, otherwise ASCII."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from setpoint.doctor.report.figures import Charts, Figure, Reading, pieces, vertices
from setpoint.doctor.report.wording import number, of_figure

LINE = "cyan"
FAINT = "bright_black"
LIMIT = "yellow"
PHASES = {
    "start-up": "magenta",
    "ramp": "blue",
    "steady": "green",
    "drain": "blue",
    "idle": "bright_black",
}
_BRAILLE = 0x2800
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bit of a dot in its character, by column and row (from the top)."""


@dataclass(slots=True, frozen=True)
class CharacterSet:
    """The characters of a terminal."""

    dots_x: int
    dots_y: int
    axis: str
    end: str
    """The upper end of the axis, beside the largest value."""
    corner: str
    rule: str
    mark: str
    """Marks evidence on the axis of time."""
    dash: str
    """Draws a limit."""
    edge: str
    """Marks the beginning of a phase."""

    def char(self, bits: int) -> str:
        return chr(_BRAILLE + bits) if self.dots_y > 1 else "*"


UNICODE = CharacterSet(
    dots_x=2, dots_y=4, axis="│", end="┤", corner="└", rule="─", mark="▲", dash="╌", edge="╎"
)
ASCII = CharacterSet(
    dots_x=1, dots_y=1, axis="|", end="+", corner="+", rule="-", mark="^", dash=".", edge="|"
)


def plot(
    figure: Figure, charts: Charts, *, width: int, height: int, script: CharacterSet
) -> list[Text]:
    """A title, ``height`` lines, and the axis of time with its labels: ``height`` + 2 lines."""
    label = label_width(figure)
    cells = _cells(figure, charts.seconds, width - label - 1, height, script)
    rows = height * script.dots_y
    limit_row = (
        None
        if figure.drawn_limit is None
        else (rows - 1 - _row(figure.drawn_limit, figure.top, rows)) // script.dots_y
    )
    lines = [_title(figure, charts, width)]
    for row in range(height):
        name = _axis(figure, figure.top) if row == 0 else ""
        axis = script.axis if row else script.end
        line = Text.assemble((f"{name:>{label}}{axis}", FAINT))
        for column in range(width - label - 1):
            bits = cells.get((column, row), 0)
            if bits:
                line.append(script.char(bits), style=LINE)
            elif row == limit_row:
                line.append(script.dash, style=LIMIT)
            else:
                line.append(" ")
        lines.append(line)
    lines.append(_time_axis(charts, label, width - label - 1, script))
    return lines


def phases(charts: Charts, *, width: int, script: CharacterSet) -> Text:
    """The phases below a chart of the same width, each with its name where there is room."""
    line = Text()
    for span in charts.phases:
        first, last = (round(at / charts.seconds * width) for at in (span.start, span.end))
        line.append(" " * (first - len(line.plain)))
        room = last - len(line.plain)
        if room < 1:
            continue
        name = span.phase if room >= len(span.phase) else ""
        edge = script.edge if room > len(span.phase) + 1 else ""
        line.append(edge + name.center(room - len(edge)), style=PHASES[span.phase])
    return line


def label_width(figure: Figure) -> int:
    """The number of columns left of the axis of values."""
    return len(_axis(figure, figure.top)) + 1


def _title(figure: Figure, charts: Charts, width: int) -> Text:
    """The title, with figures beside it as far as there is room."""
    text = of_figure(figure, charts)
    title = Text.assemble((figure.title, "bold"))
    for part in (text, text.partition(", ")[2]):
        if part and len(figure.title) + len(part) + 2 <= width:
            return title.append("  " + part, style=FAINT)
    return title


def _axis(figure: Figure, value: float) -> str:
    return number(value) + (" %" if figure.unit == "%" else "")


def _time_axis(charts: Charts, label: int, width: int, script: CharacterSet) -> Text:
    """The line below a chart: "0" at the corner, and the labels of later times."""
    row = [script.rule] * width
    for place, name in charts.ticks()[1:]:
        at = round(place * (width - 1))
        text = f" {name} "
        first = min(at - len(text) // 2, width - len(text))
        if first > 0 and all(char == script.rule for char in row[first : first + len(text)]):
            row[first : first + len(text)] = text
    for mark in charts.marks.values():
        column = _column(mark, charts.seconds, width)
        if row[column] == script.rule:
            row[column] = script.mark
    return Text(f"{'0':>{label}}{script.corner}{''.join(row)}", style=FAINT)


def _cells(
    figure: Figure, seconds: float, width: int, height: int, script: CharacterSet
) -> dict[tuple[int, int], int]:
    """(column, row from the top) of a character -> its dots."""
    cells: dict[tuple[int, int], int] = {}
    columns, rows = width * script.dots_x, height * script.dots_y
    for readings in figure.lines.values():
        strokes = _bars if figure.bars else _strokes
        for x, low, high in strokes(readings, seconds, figure.top, columns, rows):
            for y in range(low, high + 1):
                row = rows - 1 - y
                cell = (x // script.dots_x, row // script.dots_y)
                dot = _DOTS[x % 2][row % 4] if script.dots_y > 1 else 1
                cells[cell] = cells.get(cell, 0) | dot
    return cells


def _bars(
    readings: Sequence[Reading], seconds: float, top: float, columns: int, rows: int
) -> Iterator[tuple[int, int, int]]:
    for reading in readings:
        if reading.value > 0:
            yield _column(reading.at, seconds, columns), 0, _row(reading.value, top, rows)


def _strokes(
    readings: Sequence[Reading], seconds: float, top: float, columns: int, rows: int
) -> Iterator[tuple[int, int, int]]:
    """(column, lowest and highest dot) of a line through the points: in each column all that it
    passes there."""
    width = seconds / columns
    for piece in pieces(readings, width):
        (begin, first), *later = vertices(piece, width)
        x0, y0 = _column(begin, seconds, columns), _row(first, top, rows)
        yield x0, y0, y0
        for at, value in later:
            x, y = _column(at, seconds, columns), _row(value, top, rows)
            yield from _joined(x0, y0, x, y)
            x0, y0 = x, y


def _joined(x0: int, y0: int, x1: int, y1: int) -> Iterable[tuple[int, int, int]]:
    if x1 == x0:
        return [(x0, min(y0, y1), max(y0, y1))]
    found = []
    before = y0
    for x in range(x0 + 1, x1 + 1):
        y = round(y0 + (y1 - y0) * (x - x0) / (x1 - x0))
        found.append((x, min(before, y), max(before, y)))
        before = y
    return found


def _column(at: float, seconds: float, columns: int) -> int:
    return min(int(at / seconds * columns), columns - 1)


def _row(value: float, top: float, rows: int) -> int:
    """The row of a value, counted from the bottom."""
    return min(max(round(value / top * (rows - 1)), 0), rows - 1)
