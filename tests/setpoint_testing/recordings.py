"""Recordings of runs of the harness."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from setpoint.core.records import Record
from setpoint.recording.format import OFF
from setpoint.recording.recording_reader import open_recording
from setpoint.recording.replay import Outcome, Replay
from setpoint.recording.writer import RecordingConfig, start_recording
from setpoint_testing.harness import Harness


def record(
    harness: Harness,
    path: Path,
    *,
    content: str = OFF,
    records: Iterable[Record] | None = None,
    max_bytes: int = 1 << 30,
) -> Path:
    """Write a recording of what the harness has seen so far, or of ``records``; returns its
    path."""
    writer = start_recording(
        RecordingConfig(path=path, content=content, max_bytes=max_bytes),
        scheduler=harness.config,
        settings=harness.settings,
        cache=harness.cache_config,
        clock=harness.clock,
        device="cpu",
    )
    for each in harness.recorder.records if records is None else records:
        writer.on(each)
    writer.close()
    assert writer.state().ended is None
    return path


def replayed(path: Path) -> Outcome:
    return Replay(open_recording(path)).run()
