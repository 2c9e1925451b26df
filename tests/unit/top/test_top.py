"""``setpoint top``: what it makes of a console stream, and that a screen fits its terminal."""

from __future__ import annotations

import io
import itertools
import re
import socket
import sys
import threading
from functools import partial
from typing import Any

import pytest
from rich.console import Console, ConsoleDimensions
from rich.text import Text

from setpoint.commands import top_command as command
from setpoint.config.command_options import TopOptions
from setpoint.core.errors import RequestError
from setpoint.observe.progress_display import Waiting
from setpoint.top import events
from setpoint.top.events import Lost, parse_events, split_lines
from setpoint.top.painter import CLEAR, Painter
from setpoint.top.screen import WINDOW_S, ServerScreen, _recent_charts, screen
from setpoint_testing.server_process import wait_until

KNOWN = {
    "model": "tiny",
    "version": "1.2.3",
    "device": "cpu",
    "dtype": "float32",
    "limits": {"max_running_requests": 8},
    "paused": None,
}
POOL = {"total": 1000, "free": 400, "evictable": 100, "locked": 200, "held": 300}


def moment(at: float, **known: Any) -> dict[str, Any]:
    figures = {"running": 8.0, "queue": 12.0, "usage": 0.5, "gen_throughput": 431.0, "pool": POOL}
    return {"at": at, "seconds": 1.0, "limit": "seq-cap"} | figures | known


def shown(num_moments: int = 60, num_rows: int = 40) -> ServerScreen:
    server = ServerScreen()
    server.take("state", dict(KNOWN))
    for second in range(num_moments):
        server.take("moment", moment(1000.0 + second))
    report = {
        "verdict": "seq-cap",
        "summary": "The cap binds: 8 run while 12 wait.",
        "findings": [{"action": {"text": "Start the server with --max-running-requests 16."}}],
    }
    server.take("doctor", report)
    rows = [
        {"rid": f"r{index}", "state": "waiting", "why": "no_slot", "prompt": 5, "waited_s": 75.0}
        for index in range(num_rows)
    ]
    server.take("requests", {"num_running": 8, "num_queued": 12, "rows": rows})
    return server


def drawn(server: ServerScreen, *, width: int, height: int, encoding: str = "utf-8") -> list[str]:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    console = Console(file=file, force_terminal=True, color_system=None, width=width, height=height)
    console.print(screen(server, console, url="http://127.0.0.1:30000"))
    file.seek(0)
    return file.read().splitlines()


def test_events_are_read_however_they_come() -> None:
    lines = [":", "", "event: state", 'data: {"a": 1}', "", "event: x", "data: {broken", "", ": hi"]
    assert [*parse_events(lines)] == [("", None), ("state", {"a": 1}), ("", None)]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (160, 60)])
def test_a_screen_fits_its_terminal(width: int, height: int, encoding: str) -> None:
    lines = drawn(shown(), width=width, height=height, encoding=encoding)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for part in ("seq-cap", "--max-running-requests 16", "free 400 of 1,000", "r0", "no slot"):
        assert part in text
    assert "8 running, 12 waiting" in text


@pytest.mark.parametrize("num_moments", [0, 1, 2])
def test_a_server_that_has_told_little_can_be_shown(num_moments: int) -> None:
    lines = drawn(shown(num_moments, 0), width=80, height=24)
    assert any("tiny" in line for line in lines)
    assert any("Waiting for figures" in line for line in drawn(ServerScreen(), width=80, height=24))


def test_a_rest_that_began_before_the_window_is_shown_as_far_as_it_reaches() -> None:
    server = shown(10, 0)
    server.take("moment", moment(1010.0, seconds=400.0, running=0.0, usage=0.0))
    server.take("moment", moment(1410.0))
    made = _recent_charts(server)
    assert made is not None
    assert (made.begin, made.seconds) == (1411.0 - WINDOW_S, WINDOW_S)
    (running,) = (figure for figure in made.figures if figure.title == "Running requests")
    assert running.lines[""] == [(0.0, 299.0, 0.0), (299.0, 300.0, 8.0)]


def test_what_a_client_names_cannot_steer_the_terminal() -> None:
    server = shown(2, 0)
    row = {"rid": "a\x1b[2J\nb", "state": "running", "prompt": 1}
    server.take("requests", {"num_running": 1, "num_queued": 0, "rows": [row]})
    assert not any("\x1b" in line for line in drawn(server, width=80, height=24))


@pytest.mark.parametrize("rid", ["[/b]", "[red]x", ":smile:", "[link=http://x]y[/link]", "\x1b[2J"])
def test_names_of_clients_are_no_markup(rid: str) -> None:
    server = shown(2, 0)
    row = {"rid": rid, "state": rid, "why": rid}
    server.take("requests", {"num_running": 1, "num_queued": 0, "rows": [row]})
    assert any(
        rid.replace("\x1b", "\ufffd") in line for line in drawn(server, width=120, height=24)
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("state", []),
        ("state", {"limits": 5}),
        ("moment", 5),
        ("moment", {"at": "x"}),
        ("moment", {"at": 1, "pool": [1]}),
        ("requests", {"rows": [5]}),
        ("requests", {"num_running": "x"}),
        ("doctor", {"verdict": 5}),
        ("doctor", {"verdict": "x", "findings": [{"action": {}}]}),
    ],
)
def test_an_event_of_another_shape_is_told(name: str, content: Any) -> None:
    server = shown(2)
    with pytest.raises(Lost, match=f"The server's '{name}' event is not one of this version's"):
        server.take(name, content)
    assert drawn(server, width=80, height=24)


def test_figures_of_any_size_can_be_drawn() -> None:
    for figure in (-1.0, 0.0, 1e-300, 1e300):
        server = shown(2)
        pool = {"total": 1, "locked": int(figure), "held": 1 << 40, "free": -5}
        server.take("moment", moment(2000.0, pool=pool, running=figure, usage=figure))
        server.take("moment", moment(abs(figure) + 3000, running=figure, gen_throughput=figure))
        assert drawn(server, width=80, height=24)


def test_a_stream_has_lines_however_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"event: a\r\ndata: \xc3\xa9\n\n:\n"
    for size in (1, 2, 7, 100):
        chunks = [text[at : at + size] for at in range(0, len(text), size)]
        assert [*split_lines(chunks, "url")] == ["event: a", "data: é", "", ":"]
    monkeypatch.setattr(events, "MAX_EVENT", 1000)
    with pytest.raises(Lost, match="longer than"):
        [*split_lines(itertools.repeat(b"x" * 100), "url")]
    with pytest.raises(Lost, match="an event of more"):
        [*parse_events(itertools.repeat("data: 100"))]
    monkeypatch.setattr(events, "TIMEOUT_S", -1.0)
    with pytest.raises(Lost, match="takes longer"):
        [*split_lines([b"x"], "url")]


class Terminal:
    """A console on a terminal whose screen is kept as lines, and the characters that it was sent."""

    def __init__(self, width: int = 40, height: int = 6) -> None:
        self.file = io.StringIO()
        self.console = Console(
            file=self.file, force_terminal=True, color_system=None, width=width, height=height
        )
        self.rows = ["?" * width] * height
        self._read = 0

    def sent(self) -> str:
        """What was sent since the last call; the screen shows it then."""
        new = self.file.getvalue()[self._read :]
        self._read += len(new)
        if new.startswith(CLEAR):
            self.rows = [""] * len(self.rows)
        for row, text in re.findall(r"\x1b\[(\d+);1H\x1b\[K([^\x1b]*)", new):
            self.rows[int(row) - 1] = text
        return new


def test_only_the_lines_that_changed_are_drawn() -> None:
    terminal = Terminal()
    painter = Painter(terminal.console)
    painter.draw(Text("head\nfirst\nlast"))
    terminal.sent()
    assert terminal.rows == ["head", "first", "last", "", "", ""]
    painter.draw(Text("head\nfirst\nlast"))
    assert terminal.sent() == ""
    painter.draw(Text("head\nother\nlast"))
    assert len(terminal.sent()) < 20
    painter.draw(Text("head"))
    terminal.sent()
    assert terminal.rows == ["head", "", "", "", "", ""]
    painter.draw(Text("\n".join("abcdefgh")))
    terminal.sent()
    assert terminal.rows == list("abcdef")


def test_a_terminal_of_another_size_is_drawn_anew() -> None:
    terminal = Terminal()
    painter = Painter(terminal.console)
    painter.draw(Text("a\nb"))
    terminal.console.size = ConsoleDimensions(30, 4)
    painter.draw(Text("a\nb"))
    assert CLEAR in terminal.sent()[1:]
    assert terminal.rows[:2] == ["a", "b"]


def test_a_screen_is_drawn_a_few_times_a_second() -> None:
    now = [100.0]
    painter = Painter(Terminal().console, clock=lambda: now[0])
    assert painter.is_due
    painter.draw(Text("a"))
    num_drawn = 0
    for _ in range(100):
        now[0] += 0.01
        if painter.is_due:
            painter.draw(Text("b"))
            num_drawn += 1
    assert 1 <= num_drawn <= 2


def test_a_new_stream_brings_no_moment_twice() -> None:
    server = shown(5)
    server.lost("gone.")
    assert server.line == "gone."
    for second in range(7):
        server.take("moment", moment(1000.0 + second))
    assert [each.at for each in server.moments] == [1000.0 + second for second in range(7)]
    assert server.line == "8 running, 12 waiting, KV pool 50 %, 431 tokens/s, limit: seq-cap"


def test_a_server_that_is_slow_to_answer_is_waited_for_aloud(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "Waiting", partial(Waiting, first_s=0.05))
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                wait_until(lambda: "Waiting" in sys.stderr.getvalue())
                connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(RequestError, match="has no console"):
            command.top(TopOptions(url=url), api_key=None)
        thread.join()
    assert f"Waiting for {url} … " in capsys.readouterr().err
