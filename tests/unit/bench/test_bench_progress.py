"""What a person sees while a benchmark works."""

from __future__ import annotations

import time
from functools import partial

import pytest

from setpoint.bench import bench_progress as progress
from setpoint.observe.progress_display import Waiting


def test_what_takes_long_is_said_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress.waiting("Making 6 prompts"):
        pass
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(progress, "Waiting", partial(Waiting, first_s=0.01))
    with progress.waiting("Making 6 prompts"):
        time.sleep(0.1)
    assert capsys.readouterr() == ("", "setpoint: Making 6 prompts … 0 s\n")
