"""The few shapes that our charts consist of, as SVG text. Every colour is readable on white and on
black. This module knows no figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

TEXT, BLUE, GREY, ORANGE = "#7a7f87", "#1f7ae0", "#9aa3ad", "#c2571a"
"""The contrast of text is about 4 to 1 on white and 5 to 1 on black."""
FONT = "font-family='system-ui, sans-serif' font-size='12'"


def document(parts: Iterable[str], width: float, height: float) -> str:
    size = f"viewBox='0 0 {width:g} {height:g}' width='{width:g}' height='{height:g}'"
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' {size} {FONT} fill='{TEXT}'>\n"
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def text(x: float, y: float, words: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'"
        f" font-weight='{weight}'>{escape(words)}</text>"
    )


def bar(x: float, y: float, width: float, height: float, colour: str) -> str:
    return (
        f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height:.1f}' fill='{colour}'/>"
    )


def line(points: Sequence[tuple[float, float]], colour: str, *, width: float = 1.5) -> str:
    """A line through the points."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='{width:g}'/>"
