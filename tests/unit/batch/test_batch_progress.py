"""What is shown while a batch runs: the same words on a terminal and elsewhere, and nothing that
breaks the bar."""

from __future__ import annotations

import logging
import os
import pty
import sys

import pytest

from setpoint.batch.batch_progress import display, status
from setpoint.batch.tally import Tally
from setpoint.frontend.feed import EngineView
from setpoint.ipc.client import EngineClient


def running() -> tuple[Tally, EngineView]:
    tally, view = (
        Tally(2000, num_done=500, num_before=100, num_failed=3),
        EngineView(EngineClient()),
    )
    tally.started_at -= 100
    tally.prompt_tokens, tally.output_tokens = 40_000, 8_000
    view.num_running, view.num_queued, view.token_usage = 64, 500, 0.816
    return tally, view


def test_the_words() -> None:
    assert (
        status(*running())
        == "500/2000, 3 failed, 400 tok/s in, 80 tok/s out, ETA 0:06:15, usage 0.82, 64 running,"
        " 500 queued"
    )
    assert "ETA ?" in status(Tally(2000, num_done=500, num_before=500), running()[1])


def test_lines_come_at_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    with display() as shown:
        assert shown.engine_stderr is None
        shown.show(*running())
        shown.show(*running())
    assert capsys.readouterr().err.startswith("batch: 500/2000, ")
    assert capsys.readouterr().err == ""


def test_on_a_terminal_a_bar_stays_below_what_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    with open(theirs, "w") as terminal, open(ours, "rb", buffering=0) as screen:
        monkeypatch.setattr(sys, "stderr", terminal)
        handler = logging.StreamHandler()
        logging.getLogger().addHandler(handler)
        try:
            with display() as shown:
                shown.show(*running())
                logging.getLogger().warning("a warning")
                assert shown.engine_stderr is not None
                os.write(shown.engine_stderr, b"a line of the engine\n")
            assert handler.stream is terminal
        finally:
            logging.getLogger().removeHandler(handler)
        text = screen.read(1 << 16).decode()
        while "a line of the engine" not in text:
            text += screen.read(1 << 16).decode()
    assert "25 % 500/2000, 3 failed" in text
    for line in ("a warning", "a line of the engine"):
        before, _, after = text.partition(line)
        assert "━" not in before.rpartition("\x1b[2K")[2], "the bar was wiped off the line"
        assert "500/2000" in after, "and is drawn again below it"
