"""Shows the progress of a running batch on stderr: a bar on a terminal, a line every ten seconds
anywhere else.

Reads a Tally and an EngineView; changes nothing.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from setpoint.batch.tally import Tally
from setpoint.frontend.feed import EngineView

EVERY_S = 0.25
LINE_EVERY_S = 10.0


class Display(Protocol):
    @property
    def engine_stderr(self) -> int | None:
        """File descriptor to which the engine must write its log so that the bar stays intact;
        None: it may write anywhere."""
        ...

    def show(self, tally: Tally, view: EngineView) -> None:
        """Show the current state. Called every EVERY_S seconds."""
        ...


def status(tally: Tally, view: EngineView) -> str:
    """Everything except the bar, e.g. "120/2000, 3 failed, 812 tok/s in, 640 tok/s out, ETA
    0:05:12, usage 0.82, 64 running, 498 queued"."""
    parts = [
        f"{tally.num_done}/{tally.num_requests}",
        f"{tally.num_failed} failed",
        f"{tally.prompt_tokens / tally.elapsed_s:.0f} tok/s in",
        f"{(tally.output_tokens + tally.open_output_tokens) / tally.elapsed_s:.0f} tok/s out",
        f"ETA {_clock(tally.eta_s)}",
        f"usage {view.token_usage:.2f}",
        f"{view.num_running} running",
        f"{view.num_queued} queued",
    ]
    return ", ".join(parts)


@contextmanager
def display() -> Iterator[Display]:
    if sys.stderr.isatty():
        with _bar() as bar:
            yield bar
    else:
        yield Lines()


class Lines:
    engine_stderr = None

    def __init__(self) -> None:
        self._next_at = 0.0

    def show(self, tally: Tally, view: EngineView) -> None:
        now = time.monotonic()
        if now >= self._next_at:
            self._next_at = now + LINE_EVERY_S
            print(f"batch: {status(tally, view)}", file=sys.stderr, flush=True)


@contextmanager
def _bar() -> Iterator[Display]:
    """Show a bar within the block. Text written to ``sys.stderr`` or logged meanwhile, here or by
    the engine, appears above it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn

    class Bar:
        def __init__(self, progress: Progress, engine_stderr: int) -> None:
            self.engine_stderr = engine_stderr
            self._progress = progress
            self._task: TaskID | None = None

        def show(self, tally: Tally, view: EngineView) -> None:
            if self._task is None:
                self._task = self._progress.add_task("", total=tally.num_requests)
            self._progress.update(
                self._task, completed=tally.num_done, description=status(tally, view), refresh=True
            )

    progress = Progress(
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} % {task.description}"),
        console=Console(stderr=True),
        auto_refresh=False,
    )
    with progress, _log_to_current_stderr(), _relay_to_stderr() as engine_stderr:
        yield Bar(progress, engine_stderr)


@contextmanager
def _log_to_current_stderr() -> Iterator[None]:
    """Point log handlers to the current ``sys.stderr``: they keep the stream they were created
    with, and the bar has replaced it."""
    handlers = [
        handler
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.StreamHandler)
    ]
    before = [handler.setStream(sys.stderr) for handler in handlers]
    try:
        yield
    finally:
        for handler, stream in zip(handlers, before, strict=True):
            if stream is not None:
                handler.setStream(stream)


@contextmanager
def _relay_to_stderr() -> Iterator[int]:
    """Yields a file descriptor for another process. Lines that it writes there go to
    ``sys.stderr``."""
    reading, writing = os.pipe()

    def copy() -> None:
        with open(reading, errors="replace") as lines:
            for line in lines:
                print(line, end="", file=sys.stderr)

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    try:
        yield writing
    finally:
        os.close(writing)
        thread.join()


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
