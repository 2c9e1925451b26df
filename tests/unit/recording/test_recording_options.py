"""The options of a recording, from a file or a command line to what the writer is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from setpoint.commands.replay_command import replay
from setpoint.config.commandline import parse
from setpoint.config.commands import COMMANDS
from setpoint.config.options import Options
from setpoint.core.errors import ConfigError, RecordingError
from setpoint.launch.child.mapping import recording_config
from setpoint.launch.parent.preflight import preflight
from setpoint.recording.format import OFF, ON
from setpoint.recording.writer import RecordingConfig


@pytest.mark.parametrize("written", ["off", "on", '"off"'])
def test_off_and_on_in_a_config_file_are_words(tmp_path: Path, written: str) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(f"record-content: {written}")
    line = parse(COMMANDS["serve"], ["--config", str(path)])
    assert line.options.recording.record_content == written.strip('"')


def test_nothing_is_recorded_unless_it_is_asked_for() -> None:
    assert recording_config(Options()) is None
    asked = Options.of(record="run.rec", record_content=ON, record_max_bytes=1 << 21)
    assert recording_config(asked) == RecordingConfig(
        path=Path("run.rec"), content=ON, max_bytes=1 << 21
    )
    default = recording_config(Options.of(record="run.rec"))
    assert default is not None
    assert default.content == OFF


@pytest.mark.parametrize("there", ["run.rec", "run.rec.3"])
def test_a_recording_that_cannot_be_made_is_found_before_anything_starts(
    tmp_path: Path, there: str
) -> None:
    (tmp_path / there).touch()
    with pytest.raises(RecordingError, match="already"):
        preflight(Options.of(record=str(tmp_path / "run.rec")))
    with pytest.raises(RecordingError, match="no such folder"):
        preflight(Options.of(record=str(tmp_path / "no" / "run.rec")))
    preflight(Options.of(record=str(tmp_path / "other.rec")))


def test_a_replay_needs_a_recording(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a recording is missing"):
        replay(parse(COMMANDS["replay"], []).own)
    with pytest.raises(RecordingError, match="There is no recording"):
        replay(parse(COMMANDS["replay"], [str(tmp_path / "none")]).own)
