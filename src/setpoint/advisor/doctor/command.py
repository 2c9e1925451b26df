"""``setpoint doctor``: reads the sources, diagnoses, and shows the report."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rich.console import Console

from setpoint.advisor.doctor.checks import BY_CAUSE, CHECKS
from setpoint.advisor.doctor.findings import Report
from setpoint.advisor.doctor.observations import Observations
from setpoint.advisor.doctor.report.explain import print_check, print_list
from setpoint.advisor.doctor.report.terminal import MAX_WIDTH
from setpoint.config.doctor_options import DoctorOptions
from setpoint.core.errors import ConfigError

HEALTHY, FOUND, UNREADABLE = 0, 1, 2
"""Exit codes. "Not enough evidence" is FOUND, too: whoever asks whether a server is healthy has not
been told that it is."""


def doctor(options: DoctorOptions) -> int:
    """Returns the exit code; raises ConfigError or SourceError, which are UNREADABLE."""
    console = make_console(no_color=options.no_color)
    try:
        code = _run(options, console)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = FOUND
    return code


def make_console(*, no_color: bool) -> Console:
    is_sized = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(
        no_color=no_color or None, highlight=False, width=None if is_sized else MAX_WIDTH
    )


def _run(options: DoctorOptions, console: Console) -> int:
    if options.explain is not None:
        return _explain(console, options.explain)
    raise ConfigError("the doctor reads nothing yet; --explain works.")


def main_one(reports: Sequence[tuple[Report, Observations]]) -> tuple[Report, Observations]:
    """Of several lives in one source the latest with a finding; else the latest that is healthy."""

    def weight(place: int) -> tuple[int, int]:
        verdict = reports[place][0].verdict
        return {"not-enough-evidence": 0, "healthy": 1}.get(verdict, 2), place

    return reports[max(range(len(reports)), key=weight)]


def code_of(report: Report) -> int:
    return HEALTHY if report.verdict == "healthy" else FOUND


def _explain(console: Console, cause: str) -> int:
    if cause == "list":
        print_list(console, CHECKS)
        return 0
    if cause not in BY_CAUSE:
        raise ConfigError(
            f"the doctor knows no cause {cause!r}; 'setpoint doctor --explain list' names them all."
        )
    print_check(console, BY_CAUSE[cause])
    return 0
