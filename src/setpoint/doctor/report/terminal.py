"""Prints a report: the verdict, the number that proves it, what to type, what to expect.

It fits on one screen unless everything is asked for. It has no colours if the output is not a
terminal, and is plain ASCII if the terminal has nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from setpoint.doctor.checks.check import Check
from setpoint.doctor.findings import Finding, Report
from setpoint.doctor.observations import Observations
from setpoint.doctor.report import plots, wording
from setpoint.doctor.report.figures import charts

MAX_LINES = 40
MAX_WIDTH, MIN_WIDTH = 100, 72
COMMAND = "bold cyan"
_LABEL = 9
"""Columns of the labels at the left."""
_MAX_INDENT = 32
"""Most columns of the names in a list."""
_STAMP = re.compile(r"^\[[^\]]*\] ")
"""The time and rank with which a line of a log begins; its number says where it is."""
_ASCII = str.maketrans({"…": "~", "−": "-", "×": "x"})
"""Replacements for a terminal that knows ASCII only; other characters become question marks."""
_HELD = "\ue000"
"""Stands for a space at which a line must not end, while lines are made."""


@dataclass(slots=True, frozen=True)
class SectionLimits:
    """How much of each part is shown."""

    evidence: int
    ruled_out: int
    others: int
    plot_height: int
    num_plots: int
    item_lines: int
    """Lines of the screen for one line of evidence, and for the reason against an alternative."""


ALL = SectionLimits(
    evidence=64, ruled_out=64, others=64, plot_height=6, num_plots=64, item_lines=64
)
SCREENS = (
    SectionLimits(evidence=3, ruled_out=6, others=4, plot_height=6, num_plots=4, item_lines=2),
    SectionLimits(evidence=3, ruled_out=5, others=3, plot_height=4, num_plots=4, item_lines=2),
    SectionLimits(evidence=2, ruled_out=4, others=2, plot_height=4, num_plots=4, item_lines=2),
    SectionLimits(evidence=2, ruled_out=4, others=2, plot_height=3, num_plots=4, item_lines=2),
    SectionLimits(evidence=2, ruled_out=3, others=1, plot_height=2, num_plots=4, item_lines=2),
    SectionLimits(evidence=2, ruled_out=3, others=1, plot_height=2, num_plots=4, item_lines=1),
    SectionLimits(evidence=2, ruled_out=2, others=1, plot_height=2, num_plots=2, item_lines=1),
)
"""The layouts from roomy to tight: the first that fits on one screen is used."""


SHORT = SCREENS[-1]
SHORT_S = 30.0
"""Charts of fewer seconds show no course of time: they are as small as on the tightest screen."""


def width_of(console: Console) -> int:
    return min(max(console.width, MIN_WIDTH), MAX_WIDTH)


def print_report(
    console: Console,
    report: Report,
    seen: Observations,
    checks: Mapping[str, Check],
    others: Sequence[Report] = (),
    *,
    everything: bool = False,
) -> None:
    """``checks``: by cause. ``others``: reports about other servers in the sources."""
    for line in report_lines(console, report, seen, checks, others, everything=everything):
        console.print(line, soft_wrap=True)


def report_lines(
    console: Console,
    report: Report,
    seen: Observations,
    checks: Mapping[str, Check],
    others: Sequence[Report] = (),
    *,
    max_lines: int = MAX_LINES,
    everything: bool = False,
) -> list[Text]:
    """The lines of the screen, none wider than the console."""
    page = _Page(console, report, seen, checks, others)
    if everything:
        return page.lines(ALL)
    lines: list[Text] = []
    for room in SCREENS:
        lines = page.lines(room)
        if len(lines) <= max_lines:
            return lines
    return lines[:max_lines]


class _Page:
    def __init__(
        self,
        console: Console,
        report: Report,
        seen: Observations,
        checks: Mapping[str, Check],
        others: Sequence[Report],
    ) -> None:
        self._console = console
        self._report = report
        self._seen = seen
        self._checks = checks
        self._others_in_sources = others
        self._width = width_of(console)
        self._charts = charts(report, seen)
        self._script = plots.ASCII if console.options.ascii_only else plots.UNICODE

    def lines(self, room: SectionLimits) -> list[Text]:
        parts = [
            self._verdict(),
            self._action(room),
            self._drawn(room),
            self._evidence(room),
            self._ruled_out(room),
            self._others(room),
            self._sources(),
        ]
        found: list[Text] = []
        for part in parts:
            lines = list(part)
            if lines and found:
                found.append(Text())
            found += lines
        for line in found:
            line.rstrip()
            if self._script is plots.ASCII:
                plain = line.plain.translate(_ASCII).encode("ascii", "replace")
                line.plain = plain.decode("ascii")
        return found

    @property
    def _first(self) -> Finding | None:
        return self._report.findings[0] if self._report.findings else None

    def _verdict(self) -> Iterator[Text]:
        verdict = self._report.verdict
        style = {"healthy": "bold green", "not-enough-evidence": "bold yellow"}.get(
            verdict, "bold red"
        )
        title = wording.title(verdict, self._checks)
        first = self._first
        sure = f"{wording.percent(first.confidence)} sure" if first else ""
        right = ", ".join(part for part in (verdict, sure) if part)
        room = self._width - len(title) - len(right)
        if room >= 2:
            yield Text.assemble((title, style), " " * room, (right, plots.FAINT))
        else:
            yield from self._wrapped(Text(title, style=style))
            yield Text(right, style=plots.FAINT)
        yield from self._wrapped(
            Text(wording.printable(wording.proof(self._report.summary, title)))
        )

    def _action(self, room: SectionLimits) -> Iterator[Text]:
        first = self._first
        if first is None:
            for missing in self._report.missing:
                yield from self._labelled("To do", missing)
            return
        action = first.action
        what, more = wording.split(action.text)
        yield from self._labelled("Do", what, style="bold")
        if more:
            yield from self._labelled("", more)
        command = wording.command_option(action)
        if command:
            hint = f"   ({wording.how_to_change(action, self._seen.facts)})"
            line = Text.assemble((command, COMMAND), (hint, plots.FAINT))
            yield from self._labelled("Type", line)
            if live := wording.live_command(action, self._seen):
                line = Text.assemble((live, COMMAND), ("   (without a restart)", plots.FAINT))
                yield from self._labelled("or", line)
        if first.effect is not None:
            expected = wording.sentence(wording.effect_text(first.effect))
            yield from self._labelled("Expect", f"{expected} {wording.sentence(first.effect.why)}")
        after = {"Risk": first.risk, "Check": first.verify}
        if room is ALL:
            after["Wrong if"] = first.falsify
        for name, text in after.items():
            if text:
                yield from self._labelled(name, text)
        for missing in self._report.missing:
            yield from self._labelled("Missing", missing)

    def _drawn(self, room: SectionLimits) -> Iterator[Text]:
        charts = self._charts
        if charts is None:
            return
        half = (self._width - 2) // 2
        height, count = room.plot_height, room.num_plots
        if room is not ALL and charts.seconds < SHORT_S:
            height, count = min(height, SHORT.plot_height), min(count, SHORT.num_plots)
        drawn = [
            plots.plot(figure, charts, width=half, height=height, script=self._script)
            for figure in charts.figures[:count]
        ]
        for index, (figure, lines) in enumerate(zip(charts.figures, drawn, strict=False)):
            if charts.phases and index >= len(drawn) - 2:
                label = plots.label_width(figure) + 1
                bar = plots.phases(charts, width=half - label, script=self._script)
                lines.append(Text.assemble(" " * label, bar))
        for index in range(0, len(drawn), 2):
            right = drawn[index + 1] if index + 1 < len(drawn) else []
            for row, line in enumerate(drawn[index]):
                line.pad_right(half - len(line.plain))
                yield Text.assemble(line, "  ", right[row]) if right else line
        if charts.clock:
            yield from self._wrapped(Text(charts.clock, style=plots.FAINT))

    def _evidence(self, room: SectionLimits) -> Iterator[Text]:
        evidence = self._first.evidence if self._first else self._report.evidence
        if evidence:
            yield _heading("Evidence", room.evidence, len(evidence))
        several = len(self._report.sources) > 1
        items = []
        for one in evidence[: room.evidence]:
            text = one.text
            if room is not ALL:
                size = room.item_lines * (self._width - _MAX_INDENT)
                text = wording.excerpt(_STAMP.sub("", text), self._first, size)
            items.append((wording.where(one, several=several), text))
        yield from self._items(items, room.item_lines)

    def _ruled_out(self, room: SectionLimits) -> Iterator[Text]:
        others = self._first.ruled_out if self._first else ()
        if others:
            yield _heading("What it is not", room.ruled_out, len(others))
        items = [(other.cause, other.why) for other in others[: room.ruled_out]]
        yield from self._items(items, room.item_lines)

    def _others(self, room: SectionLimits) -> Iterator[Text]:
        others = self._report.findings[1:]
        if others:
            yield _heading("Also found", room.others, len(others))
        shown = others[: room.others]
        column = _column([finding.cause for finding in shown])
        for finding in shown:
            yield from self._item(column, finding.cause, finding.summary, 2)
            command = wording.command_option(finding.action) or finding.action.text
            yield from self._item(column, "", command, 2, style=COMMAND)

    def _sources(self) -> Iterator[Text]:
        for note in wording.notes(self._report)[:3]:
            yield from self._labelled("Note", note)
        server = wording.about_server(self._seen, self._charts.seconds if self._charts else None)
        for other in self._others_in_sources[:3]:
            yield from self._labelled("Besides", wording.about_other(other))
        sources = self._report.sources
        read = wording.about_source(sources[0]) if sources else ""
        if len(sources) > 1:
            read += f"; and {len(sources) - 1} more"
        yield from self._labelled("Read", "; ".join(part for part in (read, server) if part))
        yield from self._labelled(
            "More",
            f"--explain {self._report.verdict} explains it; --all shows all.",
        )

    def _labelled(self, label: str, text: str | Text, style: str = "") -> Iterator[Text]:
        content = text if isinstance(text, Text) else Text(wording.printable(text), style=style)
        for index, line in enumerate(self._wrapped(content, self._width - _LABEL)):
            head = f"{'' if index else label:<{_LABEL}}"
            yield Text.assemble((head, plots.FAINT), line)

    def _items(self, items: Sequence[tuple[str, str]], most: int) -> Iterator[Text]:
        column = _column([name for name, _ in items])
        for name, text in items:
            yield from self._item(column, name, text, most)

    def _item(
        self, column: int, name: str, text: str, most: int, style: str = ""
    ) -> Iterator[Text]:
        """A name, and its text from this column on, on at most ``most`` lines."""
        room = self._width - column
        lines = list(self._wrapped(Text(wording.printable(text), style=style), room))
        if len(lines) > most:
            lines = lines[:most]
            lines[-1].truncate(room - 1)
            lines[-1].append("…")
        for index, line in enumerate(lines):
            head = f"  {'' if index else name:<{column - 2}}"
            yield Text.assemble((head, plots.FAINT), line)

    def _wrapped(self, text: Text, width: int | None = None) -> Iterator[Text]:
        text.plain = text.plain.replace(" %", f"{_HELD}%")
        for line in text.wrap(self._console, width or self._width, overflow="fold"):
            line.rstrip()
            line.plain = line.plain.replace(_HELD, " ")
            yield line


def _column(names: Sequence[str]) -> int:
    """The column in which the texts after the names begin."""
    return min(max(map(len, names), default=0) + 4, _MAX_INDENT)


def _heading(name: str, shown: int, total: int) -> Text:
    heading = Text.assemble((name, "bold"))
    if shown < total:
        heading.append(f"  {shown} of {total}", style=plots.FAINT)
    return heading
