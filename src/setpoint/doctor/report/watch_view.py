"""``setpoint doctor --watch``: the report of the last minutes, renewed until Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from setpoint.core.errors import SourceError
from setpoint.doctor.checks.check import Check
from setpoint.doctor.checks.diagnose import diagnose
from setpoint.doctor.findings import Report
from setpoint.doctor.main_report import main_report
from setpoint.doctor.observations import Observations
from setpoint.doctor.readers.watched import WINDOW_S, Watched
from setpoint.doctor.report import plots
from setpoint.doctor.report.figures import duration
from setpoint.doctor.report.terminal import print_report, report_lines
from setpoint.doctor.report.wording import printable

EVERY_S = 3.0
"""Time between two looks at a log, and how long a server is watched for one."""


def watch(console: Console, watched: Watched, checks: Mapping[str, Check]) -> Report:
    """Show reports until Ctrl-C; returns the last one. On a terminal the screen is renewed;
    otherwise a line is written when the verdict changes. Raises SourceError if the first look
    fails."""
    view = _View(console, watched, checks)
    try:
        if console.is_terminal:
            view.renew_screen()
        else:
            view.write_lines()
    except KeyboardInterrupt:
        pass
    if console.is_terminal:
        print_report(console, view.report, view.seen, checks)
    return view.report


class _View:
    def __init__(self, console: Console, watched: Watched, checks: Mapping[str, Check]) -> None:
        self._console = console
        self._watched = watched
        self._checks = checks
        self._trouble = ""
        self.report, self.seen = self._diagnosed()

    def renew_screen(self) -> None:
        with Live(console=self._console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(Group(*self._screen()), refresh=True)
                self._look_again()

    def write_lines(self) -> None:
        said = ""
        while True:
            now = self._trouble or f"{self.report.verdict}: {self.report.summary}"
            if now.partition(":")[0] != said:
                said = now.partition(":")[0]
                self._console.print(f"{_clock()} {printable(now)}", soft_wrap=True, markup=False)
            self._look_again()

    def _look_again(self) -> None:
        """Read the sources again. If they cannot be read now, keep the report: they may be readable
        again soon."""
        began = time.monotonic()
        try:
            self.report, self.seen = self._diagnosed()
            self._trouble = ""
        except SourceError as error:
            self._trouble = str(error)
        time.sleep(max(0.0, EVERY_S - (time.monotonic() - began)))

    def _diagnosed(self) -> tuple[Report, Observations]:
        return main_report([(diagnose(seen), seen) for seen in self._watched.look(seconds=EVERY_S)])

    def _screen(self) -> list[Text]:
        head = Text(f"{_clock()}, the last {duration(WINDOW_S)}; Ctrl-C ends", style=plots.FAINT)
        lines = [Text(self._trouble, style="yellow")] if self._trouble else []
        rows = self._console.height - len(lines) - 2
        report = report_lines(self._console, self.report, self.seen, self._checks, max_lines=rows)
        return [head, *lines, Text(), *report]


def _clock() -> str:
    return time.strftime("%H:%M:%S")
