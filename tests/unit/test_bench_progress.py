"""What a person sees while a benchmark works."""

from __future__ import annotations

import io
import time

import pytest

from setpoint.bench import progress


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_a_line_for_what_takes_long(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with progress.waiting("making prompts"):
        pass
    monkeypatch.setattr(progress, "TICK_S", 0.01)
    with progress.waiting("loading"):
        time.sleep(0.1)
    assert capsys.readouterr().err == "bench: loading, 0 s\n"
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.01)
    with progress.waiting("loading"):
        time.sleep(0.1)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 1
    assert set(lines) == {"bench: loading, 0 s"}


def fails_slowly() -> None:
    with progress.waiting("loading"):
        time.sleep(0.1)
        raise KeyError


def test_a_terminal_gets_one_line_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr(progress, "TICK_S", 0.01)
    with pytest.raises(KeyError):
        fails_slowly()
    shown = screen.getvalue()
    assert "\n" not in shown
    assert shown.startswith("\r\x1b[Kbench: loading\r\x1b[Kbench: loading, 0 s")
    assert shown.endswith("\r\x1b[K")
