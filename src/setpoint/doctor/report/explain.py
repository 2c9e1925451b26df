"""``setpoint doctor --explain``: what a check knows about its cause, as a lesson."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from setpoint.doctor.checks.check import Check
from setpoint.doctor.report import plots
from setpoint.doctor.report.terminal import width_of

_INDENT = "  "


def print_check(console: Console, check: Check) -> None:
    for line in check_lines(console, check):
        console.print(line, soft_wrap=True)


def print_list(console: Console, checks: Sequence[Check]) -> None:
    """The causes, a line for each."""
    console.print(Text("The causes that the doctor can name", style="bold"))
    width = max((len(check.cause) for check in checks), default=0)
    for check in checks:
        console.print(
            Text.assemble((f"{_INDENT}{check.cause:<{width}}  ", "cyan"), check.title),
            soft_wrap=True,
        )
    console.print(Text("setpoint doctor --explain CAUSE explains one.", style=plots.FAINT))


def check_lines(console: Console, check: Check) -> Iterator[Text]:
    width = width_of(console)
    yield Text.assemble((check.title, "bold"), (f"   {check.cause}", plots.FAINT))
    yield from _paragraphs(console, check.meaning, width)
    if check.picture:
        yield Text()
        for line in check.picture.strip("\n").splitlines():
            yield Text(_INDENT + line, style="cyan")
    for heading, text in (
        ("When the doctor reports it", check.rule),
        ("When it does not", check.counter_evidence),
        ("What it advises", check.advice),
        ("What the guides say", check.guide),
    ):
        if text:
            yield Text()
            yield Text(heading, style="bold")
            yield from _paragraphs(console, text, width)
    if check.equation:
        yield Text()
        yield Text("How the value is computed", style="bold")
        for line in check.equation.strip("\n").splitlines():
            yield from _paragraphs(console, line, width, style="cyan")


def _paragraphs(console: Console, text: str, width: int, style: str = "") -> Iterator[Text]:
    lines = Text(text.strip(), style=style).wrap(console, width - len(_INDENT))
    for line in lines:
        line.rstrip()
        yield Text.assemble(_INDENT, line)
