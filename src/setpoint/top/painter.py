"""Draws a screen in a terminal and writes only what has changed: over a slow connection a whole
screen for each event of a busy server would be most of the traffic."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType

EVERY_S = 0.5
"""Least time between two drawings."""
CLEAR, TO_LINE, ERASE_LINE = "\x1b[2J", "\x1b[{};1H", "\x1b[K"
"""Clear the screen; move to the beginning of a line, counted from 1; erase the rest of a line. A
line is erased before it is written: behind a full one the cursor is still on its last character."""


class Painter:
    """The lines that a terminal shows now. ``clock``: seconds that only increase."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._size: tuple[int, int] | None = None
        """Columns and rows of the last drawing."""
        self._lines: list[str] = []
        self._drawn_at = -EVERY_S

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Use the terminal's other screen, without a cursor, until the end of the block."""
        with self._console.screen():
            yield

    @property
    def is_due(self) -> bool:
        """Whether the last drawing is old enough for another."""
        return self._clock() - self._drawn_at >= EVERY_S

    def draw(self, content: RenderableType) -> None:
        """Show the content from the top of the screen; what is below the last row is left out."""
        console, size = self._console, (self._console.width, self._console.height)
        with console.capture() as captured:
            console.print(content)
        lines = captured.get().splitlines()[: size[1]]
        lines += [""] * (size[1] - len(lines))
        if size != self._size:
            self._size, self._lines = size, [""] * size[1]
            console.file.write(CLEAR)
        changed = [
            f"{TO_LINE.format(row)}{ERASE_LINE}{line}"
            for row, (line, old) in enumerate(zip(lines, self._lines, strict=True), start=1)
            if line != old
        ]
        console.file.write("".join(changed))
        console.file.flush()
        self._lines, self._drawn_at = lines, self._clock()
