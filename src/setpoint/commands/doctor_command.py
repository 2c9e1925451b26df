"""Runs ``setpoint doctor``: reads the sources, diagnoses them and shows the report. What only some
options need is imported with them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches

from rich.console import Console

from setpoint.config.command_options import DoctorOptions
from setpoint.core.errors import ConfigError, SourceError
from setpoint.doctor.checks import BY_CAUSE, CHECKS
from setpoint.doctor.checks.diagnose import diagnose
from setpoint.doctor.contract import contract
from setpoint.doctor.findings import Report
from setpoint.doctor.main_report import main_report
from setpoint.doctor.readers.sources import observe_sources
from setpoint.doctor.report.terminal import MAX_WIDTH, print_report

HEALTHY, FOUND, UNREADABLE = 0, 1, 2
"""Exit codes. "Not enough evidence" is FOUND as well, because the report then does not say that the
server is healthy."""


def doctor(options: DoctorOptions) -> int:
    """Run the command; returns the exit code. Raises ConfigError or SourceError, for which the exit
    code is UNREADABLE."""
    console = make_console(no_color=options.no_color)
    with reader_may_leave():
        return _run(options, console)
    return FOUND


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Ends what prints within, without an error, once the reader of the pipe has stopped reading
    (``| head``)."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def make_console(*, no_color: bool) -> Console:
    is_sized = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(
        no_color=no_color or None, highlight=False, width=None if is_sized else MAX_WIDTH
    )


def _run(options: DoctorOptions, console: Console) -> int:
    if options.explain is not None:
        return _explain(console, options.explain)
    if not options.source:
        raise ConfigError(
            "name a source: setpoint doctor SOURCE. A source is a log, - for standard input, or"
            " a server's URL."
        )
    if not all(options.source):
        raise ConfigError("a SOURCE is empty; give the name of a log or a URL.")
    if options.watch:
        _check_watch(options)
        from setpoint.doctor.readers.watched import Watched
        from setpoint.doctor.report.watch_view import watch

        return code_of(watch(console, Watched(options.source, api_key=options.api_key), BY_CAUSE))
    with _waiting(options):
        try:
            lives = observe_sources(
                options.source, seconds=options.seconds, api_key=options.api_key
            )
        except OSError as error:  # any other error that a path may cause
            names = ", ".join(options.source)
            raise SourceError(f"{names} cannot be read: {error.strerror or error}.") from None
    reports = [(diagnose(seen), seen) for seen in lives]
    report, seen = main_report(reports)
    others = [other for other, _ in reports if other is not report]
    if options.json:
        print(json.dumps(contract(report, others), indent=2))
    else:
        print_report(console, report, seen, BY_CAUSE, others, everything=options.all)
    return code_of(report)


def _check_watch(options: DoctorOptions) -> None:
    for name in ("json", "all"):
        if getattr(options, name):
            raise ConfigError(
                f"--watch refreshes one screen and cannot be combined with --{name}; leave one of"
                " the two out."
            )
    if "-" in options.source:
        raise ConfigError(
            "--watch reads a log repeatedly, which is not possible with standard input; name a"
            " file."
        )


def code_of(report: Report) -> int:
    return HEALTHY if report.verdict == "healthy" else FOUND


def _explain(console: Console, cause: str) -> int:
    from setpoint.doctor.report.explain import print_check, print_list

    if cause == "list":
        print_list(console, CHECKS)
        return 0
    if cause not in BY_CAUSE:
        near = get_close_matches(cause, BY_CAUSE, n=1) or [
            known for known in BY_CAUSE if known.startswith(cause)
        ]
        meant = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"the doctor knows no cause {cause!r}.{meant} 'setpoint doctor --explain list' lists"
            " all causes."
        )
    print_check(console, BY_CAUSE[cause])
    return 0


@contextmanager
def _waiting(options: DoctorOptions) -> Iterator[None]:
    """A context in which a terminal shows what the command is waiting for."""
    if not sys.stderr.isatty():
        yield
        return
    watched = [name for name in options.source if "://" in name]
    text = f"watching {watched[0]} for {options.seconds:g} s" if watched else "reading"
    with Console(stderr=True).status(text):
        yield
