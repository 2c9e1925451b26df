"""What ``setpoint top`` knows about a server, and how it shows that in a terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from setpoint.core.conversion import convert
from setpoint.core.moments import Moment
from setpoint.doctor import findings
from setpoint.doctor.observations import Facts, Observations, Rank
from setpoint.doctor.report import plots
from setpoint.doctor.report.figures import Charts, charts, duration
from setpoint.doctor.report.wording import number, percent, printable
from setpoint.top.contents import Report, Requests, Row, State
from setpoint.top.events import Lost

KEPT = 600
"""Moments that are kept."""
WINDOW_S = 300.0
"""Time that the charts show."""
PLOT_HEIGHT = 4
MIN_ROWS = 3
"""Rows of the table for which charts give up height."""
POOL = (("locked", "#", "red"), ("held", "+", "yellow"), ("evictable", "-", "blue"))
"""States of the pool's tokens that are drawn, with their characters; the rest is free."""
ASCII = {"·": "|", "…": "~"}
"""Replacements of characters for a terminal that has only ASCII."""
COLUMNS = ("request", "state", "why", "prompt", "output", "waited", "ran", "tok/s")


class ServerScreen:
    """The latest content of each kind of event."""

    def __init__(self) -> None:
        self.state = State()
        self.moments: deque[Moment] = deque(maxlen=KEPT)
        self.limit = ""
        """The limit that bound in the latest moment."""
        self.report: Report | None = None
        self.requests = Requests()
        self.trouble = ""
        """Why the stream cannot be read now."""

    def take(self, name: str, content: Any) -> None:
        """Store the content of an event. Raises Lost if this version cannot read it."""
        self.trouble = ""
        try:
            match name:
                case "state":
                    self.state = convert(content, State)
                case "requests":
                    self.requests = convert(content, Requests)
                case "doctor":
                    self.report = convert(content, Report)
                case "moment":
                    moment = convert(content, Moment)
                    if "dp_rank" in content:
                        return  # of one engine; those of all are shown
                    self.limit = str(content.get("limit", ""))
                    if not self.moments or moment.at > self.moments[-1].at:
                        self.moments.append(moment)
        except msgspec.ValidationError as error:
            raise Lost(
                f"The server's {name!r} event is not one of this version's: {error}.",
                status_code=503,
            ) from None

    def lost(self, why: str) -> None:
        """Note why the stream was lost. The moments stay: the next stream repeats the last
        minutes."""
        self.trouble = why

    @property
    def line(self) -> str:
        """One line for an output that is not a terminal."""
        if self.trouble:
            return self.trouble
        if not self.moments:
            return "no figures yet"
        now = self.moments[-1]
        parts = [
            f"{_whole(now.running)} running",
            f"{_whole(now.queue)} waiting",
            f"KV pool {percent(now.usage or 0.0)}",
            f"{_whole(now.gen_throughput)} tokens/s",
        ]
        if self.limit:
            parts.append(f"limit: {printable(self.limit)}")
        return ", ".join(parts)


def screen(server: ServerScreen, console: Console, *, url: str) -> Group:
    """The whole screen, as high as the console."""
    width, script = console.width, plots.ASCII if console.options.ascii_only else plots.UNICODE
    above = [*_head(server, width, url), *_verdict(server, width)]
    pool = [*_pool(server, width)]
    plot_lines = _plot_lines(
        server, width, script, _plot_height(console.height - len(above) - len(pool))
    )
    room = console.height - len(above) - len(pool) - len(plot_lines) - 3
    lines, is_ascii = [*above, *plot_lines, *pool], console.options.ascii_only
    if is_ascii:
        for line in lines:
            line.plain = _in_ascii(line.plain)
    return Group(*lines, _table(server, max(room, MIN_ROWS), is_ascii=is_ascii))


def _head(server: ServerScreen, width: int, url: str) -> Iterator[Text]:
    state = server.state
    name = " ".join(part for part in (state.model, state.dtype, state.device) if part)
    version = f"Setpoint {state.version}" if state.version else ""
    left = " · ".join(part for part in (name, version, url) if part)
    clock = time.strftime("%H:%M:%S")
    yield _spread(Text(printable(left), style="bold"), Text(f"{clock}  Ctrl-C ends"), width)
    if server.trouble:
        yield Text(f"{printable(server.trouble)} Trying again …", style="yellow")
    if state.paused:
        yield Text(f"The server is paused ({printable(state.paused)}).", style="yellow")


def _verdict(server: ServerScreen, width: int) -> Iterator[Text]:
    report = server.report
    if report is None:
        yield Text("The doctor has not looked yet.", style=plots.FAINT)
        return
    style = {"healthy": "green", "client-bound": "cyan", "not-enough-evidence": "yellow"}
    line = Text.assemble(
        (f" {printable(report.verdict)} ", f"reverse {style.get(report.verdict, 'red')}"),
        " ",
        printable(report.summary),
    )
    line.truncate(width, overflow="ellipsis")
    yield line
    for finding in report.findings[:1]:
        if finding.action is not None:
            what = printable(finding.action.text)
            action = Text.assemble(("   to do: ", plots.FAINT), what)
            action.truncate(width, overflow="ellipsis")
            yield action


def _plot_height(rows: int) -> int:
    """The height of a chart. There are two rows of charts, each with two lines more than this
    height; the table gets the rest."""
    return min(PLOT_HEIGHT, max((rows - MIN_ROWS - 7) // 2, 1))


def _plot_lines(
    server: ServerScreen, width: int, script: plots.CharacterSet, height: int
) -> list[Text]:
    recent = _recent_charts(server)
    if recent is None:
        return [Text("Waiting for figures …", style=plots.FAINT)]
    half = (width - 3) // 2
    each = [
        plots.plot(figure, recent, width=half, height=height, script=script)
        for figure in recent.figures[:4]
    ]
    lines = []
    for index in range(0, len(each), 2):
        right = each[index + 1] if index + 1 < len(each) else []
        for row, line in enumerate(each[index]):
            line.pad_right(half - len(line.plain))
            lines.append(Text.assemble(line, "   ", right[row]) if right else line)
    return lines


def _recent_charts(server: ServerScreen) -> Charts | None:
    """The charts of the last WINDOW_S seconds; None if nothing was measured yet."""
    if not server.moments:
        return None
    newest = server.moments[-1]
    begin = newest.at + newest.seconds - WINDOW_S
    recent = [_cut_before(begin, each) for each in server.moments if each.at + each.seconds > begin]
    limits = server.state.limits
    facts = Facts(max_running_requests=None if limits is None else limits.max_running_requests)
    report = findings.Report(verdict="", summary="", findings=[], coverage=1.0, sources=[])
    return charts(report, Observations([], facts, [Rank("", recent)]))


def _cut_before(begin: float, moment: Moment) -> Moment:
    """The part of the moment from ``begin`` on: a moment without requests can be long."""
    if moment.at >= begin:
        return moment
    seconds = moment.at + moment.seconds - begin
    return msgspec.structs.replace(moment, at=begin, seconds=seconds)


def _pool(server: ServerScreen, width: int) -> Iterator[Text]:
    pool = server.moments[-1].pool if server.moments else {}
    total = pool.get("total", 0)
    if total <= 0:
        return
    bar_width = max(width - 10, 10)
    bar = Text("KV pool  ", style="bold")
    for name, char, colour in POOL:
        cells = round(pool.get(name, 0) / total * bar_width)
        bar.append(char * min(max(cells, 0), bar_width), style=colour)
    bar.append("." * max(bar_width + 9 - len(bar.plain), 0), style=plots.FAINT)
    yield bar
    parts = [f"{char} {name} {pool.get(name, 0):,}" for name, char, _ in POOL]
    parts.append(f". free {pool.get('free', 0):,} of {total:,} tokens")
    yield Text(f"{'':9}{'   '.join(parts)}", style=plots.FAINT)


def _table(server: ServerScreen, rows: int, *, is_ascii: bool) -> Table:
    requests = server.requests
    title = f"Requests: {requests.num_running} running, {requests.num_queued} waiting"
    table = Table(box=None, pad_edge=False, expand=True, title=title, title_justify="left")
    for name in COLUMNS:
        right = name in ("prompt", "output", "waited", "ran", "tok/s")
        table.add_column(
            name,
            justify="right" if right else "left",
            no_wrap=True,
            overflow="crop" if is_ascii else "ellipsis",
        )
    for row in requests.rows[:rows]:
        cells = map(_in_ascii, _cells(row)) if is_ascii else _cells(row)
        # As Text, because rich looks for markup in strings, and clients choose these names.
        table.add_row(*map(Text, cells), style=plots.FAINT if row.state == "ended" else "")
    return table


def _cells(row: Row) -> list[str]:
    why = row.end if row.state == "ended" else row.why
    return [
        printable(row.rid)[:24],
        printable(row.state),
        printable(why or "").replace("_", " "),
        f"{row.prompt:,}",
        f"{row.output:,}" + (f"/{row.limit:,}" if row.limit else ""),
        *("" if each is None else _seconds(each) for each in (row.waited_s, row.ran_s)),
        "" if row.tps is None else number(row.tps),
    ]


def _in_ascii(text: str) -> str:
    """The text in ASCII. It keeps its length, so that styles stay where they are."""
    return "".join(char if char.isascii() else ASCII.get(char, "?") for char in text)


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 60 else duration(value)


def _whole(value: float | None) -> str:
    return "?" if value is None else f"{value:,.0f}"


def _spread(left: Text, right: Text, width: int) -> Text:
    left.truncate(max(width - len(right.plain) - 2, 1), overflow="ellipsis")
    gap = width - len(left.plain) - len(right.plain)
    return Text.assemble(left, " " * max(gap, 1), (right.plain, plots.FAINT))
