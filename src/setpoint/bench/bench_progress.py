"""Shows progress while a benchmark runs: on a terminal one line that is kept up to date, elsewhere
a line now and then.

All of it goes to stderr.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from setpoint.bench.request_record import RequestRecord
from setpoint.observe.progress_display import Waiting, on_stderr

EVERY_S = 0.25
LINE_EVERY_S = 10.0


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """While the block runs, show ``what`` it does, e.g. "Making 64 prompts", with the seconds so
    far, if it takes long."""
    line = Waiting(what, on_stderr())
    try:
        yield
    finally:
        line.end()


@contextmanager
def progress(total: int) -> Iterator[Callable[[RequestRecord], None]]:
    """Within the block, call the yielded function with each record that has ended. Nothing is drawn
    in between, because that would cost CPU time."""
    if sys.stderr.isatty():
        with _bar(total) as show:
            yield _Count(show, EVERY_S, total)
    else:
        yield _Count(
            lambda done, failed: print(
                f"bench: {done}/{total}, {failed} failed", file=sys.stderr, flush=True
            ),
            LINE_EVERY_S,
            total,
        )


class _Count:
    def __init__(self, show: Callable[[int, int], None], every_s: float, total: int) -> None:
        self._show, self._every_s, self._total = show, every_s, total
        self._done = self._failed = 0
        self._next_at = time.monotonic() + every_s

    def __call__(self, record: RequestRecord) -> None:
        self._done += 1
        self._failed += bool(record.error)
        now = time.monotonic()
        if now >= self._next_at or self._done == self._total:
            self._next_at = now + self._every_s
            self._show(self._done, self._failed)


@contextmanager
def _bar(total: int) -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as bar:
        task = bar.add_task("", total=total)
        bar.refresh()
        yield lambda done, failed: bar.update(
            task, completed=done, description=f", {failed} failed" if failed else "", refresh=True
        )
