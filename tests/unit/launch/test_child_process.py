"""The start of an engine's process by another."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any

import pytest

from setpoint.launch import process


def test_an_interrupt_that_comes_during_a_start_ends_what_was_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Red before: the process went on, because nobody had it yet."""
    started: list[subprocess.Popen[bytes]] = []

    class InterruptedPopen(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(process.subprocess, "Popen", InterruptedPopen)
    with pytest.raises(KeyboardInterrupt):
        process.spawn_child(None, num_ranks=1, stderr=subprocess.DEVNULL)
    assert [each.poll() for each in started] == [-signal.SIGKILL]
