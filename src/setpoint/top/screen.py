"""What ``setpoint top`` knows of a server, and how it looks in a terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from setpoint.advisor.doctor.findings import Report
from setpoint.advisor.doctor.observations import Facts, Observations, Rank
from setpoint.advisor.doctor.report import plots
from setpoint.advisor.doctor.report.figures import Charts, charts, duration
from setpoint.advisor.doctor.report.wording import number, percent, printable
from setpoint.core.conversion import convert
from setpoint.observe.moments import Moment

KEPT = 600
WINDOW_S = 300.0
"""Time that the charts show."""
PLOT_HEIGHT = 4
MIN_ROWS = 3
"""Rows of the table for which charts give up height."""
POOL = (("locked", "#", "red"), ("held", "+", "yellow"), ("evictable", "-", "blue"))
"""States of the pool's tokens that are drawn, with their characters; the rest is free."""
ASCII = {"·": "|", "…": "~"}
"""Characters for a terminal that has no others."""
COLUMNS = ("request", "state", "why", "prompt", "output", "waited", "ran", "tok/s")


class Server:
    """The latest of everything that the stream has told."""

    def __init__(self) -> None:
        self.facts: Mapping[str, Any] = {}
        self.moments: deque[Moment] = deque(maxlen=KEPT)
        self.limit = ""
        """The limit that bound in the latest moment."""
        self.report: Mapping[str, Any] = {}
        self.requests: Mapping[str, Any] = {}
        self.trouble = ""
        """Why the stream cannot be read now."""

    def take(self, name: str, content: Any) -> None:
        self.trouble = ""
        match name:
            case "state":
                self.facts = content
            case "requests":
                self.requests = content
            case "doctor":
                self.report = content
            case "moment":
                self.limit = content.pop("limit", "")
                moment = convert(content, Moment)
                if not self.moments or moment.at > self.moments[-1].at:
                    self.moments.append(moment)

    def lost(self, why: str) -> None:
        """The next stream begins with the last minutes again."""
        self.trouble = why

    @property
    def line(self) -> str:
        """One line for an output that is no terminal."""
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
            parts.append(f"limit: {self.limit}")
        return ", ".join(parts)


def screen(server: Server, console: Console, *, url: str) -> Group:
    """The whole screen, as high as the console."""
    width, script = console.width, plots.ASCII if console.options.ascii_only else plots.UNICODE
    above = [*_head(server, width, url), *_verdict(server, width)]
    pool = [*_pool(server, width)]
    drawn = _charts(server, width, script, _plot_height(console.height - len(above) - len(pool)))
    room = console.height - len(above) - len(pool) - len(drawn) - 3
    lines, is_ascii = [*above, *drawn, *pool], console.options.ascii_only
    if is_ascii:
        for line in lines:
            line.plain = _in_ascii(line.plain)
    return Group(*lines, _table(server, max(room, MIN_ROWS), is_ascii=is_ascii))


def _head(server: Server, width: int, url: str) -> Iterator[Text]:
    facts = server.facts
    name = " ".join(str(facts[key]) for key in ("model", "dtype", "device") if facts.get(key))
    version = f"Setpoint {facts['version']}" if facts.get("version") else ""
    left = " · ".join(part for part in (name, version, url) if part)
    clock = time.strftime("%H:%M:%S")
    yield _spread(Text(printable(left), style="bold"), Text(f"{clock}  Ctrl-C ends"), width)
    if server.trouble:
        yield Text(f"{server.trouble} Trying again …", style="yellow")
    if facts.get("paused"):
        yield Text(f"The server is paused ({facts['paused']}).", style="yellow")


def _verdict(server: Server, width: int) -> Iterator[Text]:
    verdict = server.report.get("verdict")
    if verdict is None:
        yield Text("The doctor has not looked yet.", style=plots.FAINT)
        return
    style = {"healthy": "green", "client-bound": "cyan", "not-enough-evidence": "yellow"}
    line = Text.assemble(
        (f" {verdict} ", f"reverse {style.get(verdict, 'red')}"),
        " ",
        printable(str(server.report.get("summary", ""))),
    )
    line.truncate(width, overflow="ellipsis")
    yield line
    for finding in server.report.get("findings", ())[:1]:
        action = Text.assemble(("   to do: ", plots.FAINT), printable(finding["action"]["text"]))
        action.truncate(width, overflow="ellipsis")
        yield action


def _plot_height(rows: int) -> int:
    """Two rows of charts, each with two more lines than its height; the table gets the rest."""
    return min(PLOT_HEIGHT, max((rows - MIN_ROWS - 7) // 2, 1))


def _charts(server: Server, width: int, script: plots.Script, height: int) -> list[Text]:
    drawn = _drawable(server)
    if drawn is None:
        return [Text("Waiting for figures …", style=plots.FAINT)]
    half = (width - 3) // 2
    each = [
        plots.plot(figure, drawn, width=half, height=height, script=script)
        for figure in drawn.figures[:4]
    ]
    lines = []
    for index in range(0, len(each), 2):
        right = each[index + 1] if index + 1 < len(each) else []
        for row, line in enumerate(each[index]):
            line.pad_right(half - len(line.plain))
            lines.append(Text.assemble(line, "   ", right[row]) if right else line)
    return lines


def _drawable(server: Server) -> Charts | None:
    if not server.moments:
        return None
    end = server.moments[-1].at
    shown = [moment for moment in server.moments if moment.at >= end - WINDOW_S]
    limits = server.facts.get("limits") or {}
    facts = Facts(max_running_requests=limits.get("max_running_requests"))
    report = Report(verdict="", summary="", findings=[], coverage=1.0, sources=[])
    return charts(report, Observations([], facts, [Rank("", shown)]))


def _pool(server: Server, width: int) -> Iterator[Text]:
    pool = server.moments[-1].pool if server.moments else {}
    total = pool.get("total", 0)
    if not total:
        return
    bar_width = max(width - 10, 10)
    bar = Text("KV pool  ", style="bold")
    for name, char, colour in POOL:
        cells = round(pool.get(name, 0) / total * bar_width)
        bar.append(char * cells, style=colour)
    bar.append("." * max(bar_width + 9 - len(bar.plain), 0), style=plots.FAINT)
    yield bar
    parts = [f"{char} {name} {pool.get(name, 0):,}" for name, char, _ in POOL]
    parts.append(f". free {pool.get('free', 0):,} of {total:,} tokens")
    yield Text(f"{'':9}{'   '.join(parts)}", style=plots.FAINT)


def _table(server: Server, rows: int, *, is_ascii: bool) -> Table:
    told = server.requests
    title = f"Requests: {told.get('num_running', 0)} running, {told.get('num_queued', 0)} waiting"
    table = Table(box=None, pad_edge=False, expand=True, title=title, title_justify="left")
    for name in COLUMNS:
        right = name in ("prompt", "output", "waited", "ran", "tok/s")
        table.add_column(
            name,
            justify="right" if right else "left",
            no_wrap=True,
            overflow="crop" if is_ascii else "ellipsis",
        )
    for row in told.get("rows", ())[:rows]:
        cells = map(_in_ascii, _cells(row)) if is_ascii else _cells(row)
        table.add_row(*cells, style=plots.FAINT if row.get("state") == "ended" else "")
    return table


def _cells(row: Mapping[str, Any]) -> list[str]:
    state = row.get("state", "")
    limit = row.get("limit")
    output = f"{row.get('output', 0):,}" + (f"/{limit:,}" if limit else "")
    why = row.get("end") if state == "ended" else row.get("why")
    return [
        printable(str(row.get("rid", "")))[:24],
        state,
        str(why or "").replace("_", " "),
        f"{row.get('prompt', 0):,}",
        output,
        *(("" if row.get(key) is None else _seconds(row[key])) for key in ("waited_s", "ran_s")),
        "" if row.get("tps") is None else number(row["tps"]),
    ]


def _in_ascii(text: str) -> str:
    """As long as before, so that styles stay where they are."""
    return "".join(char if char.isascii() else ASCII.get(char, "?") for char in text)


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 60 else duration(value)


def _whole(value: float | None) -> str:
    return "?" if value is None else f"{value:,.0f}"


def _spread(left: Text, right: Text, width: int) -> Text:
    left.truncate(max(width - len(right.plain) - 2, 1), overflow="ellipsis")
    gap = width - len(left.plain) - len(right.plain)
    return Text.assemble(left, " " * max(gap, 1), (right.plain, plots.FAINT))
