"""Runs ``setpoint replay``: replays a recording and compares the plans, or prints the recording as
a log."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from setpoint.config.command_options import ReplayOptions
from setpoint.core.errors import ConfigError
from setpoint.core.records import Turn
from setpoint.observe.figures import Figures
from setpoint.observe.logline import LineFormatter, LogLines
from setpoint.observe.tee import Tee
from setpoint.recording.codec import as_record
from setpoint.recording.format import Header, KeptRecord, KeptResult, KeptTurn, consistent
from setpoint.recording.recording_reader import Recording, open_recording
from setpoint.recording.replay import Outcome, Replay


def replay(options: ReplayOptions) -> int:
    """Run the command. Returns exit code 0 if every plan was equal to the recorded one, 1 if not.
    Raises ConfigError without a file, RecordingError for a file that cannot be replayed.
    """
    if options.file is None:
        raise ConfigError("a recording is missing; see 'setpoint replay --help'.")
    recording = open_recording(Path(options.file))
    if options.print:
        return _print(recording)
    logging.disable()  # the recorded engine has already logged the same lines
    try:
        outcome = Replay(recording).run()
    finally:
        logging.disable(logging.NOTSET)
    for line in _lines(outcome, recording):
        print(line)
    return 0 if outcome.agrees else 1


def _lines(outcome: Outcome, recording: Recording) -> list[str]:
    lines = [f"Note: {note}" for note in recording.notes]
    if outcome.ended_by:
        lines.append(f"The replay ends where the engine ended, with {outcome.ended_by}")
    if outcome.damage:
        lines.append(f"Error: {outcome.damage} Everything before that was replayed.")
    counts = f"{outcome.num_steps} steps, {outcome.num_requests} requests"
    speed = outcome.num_steps / max(outcome.seconds, 1e-9)
    took = f"({outcome.seconds:.1f} s, {speed:.0f} steps/s)"
    if outcome.difference:
        return [*lines, f"The first difference is {outcome.difference}", f"{counts} {took}"]
    return [*lines, f"{counts}, 0 differing plans {took}"]


class _RecordedTime(logging.Filter):
    """Gives log records the time at which the recorded engine wrote them."""

    def __init__(self, header: Header) -> None:
        super().__init__()
        self._offset = header.began_at - header.clock_at
        self.at = header.clock_at
        """Time, on the engine's clock, of the record that is being printed."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.created = self._offset + self.at
        record.msecs = record.created % 1 * 1000
        return True


def _print(recording: Recording) -> int:
    header = recording.header
    handler, then = logging.StreamHandler(sys.stdout), _RecordedTime(header)
    handler.setFormatter(
        LineFormatter(
            "[%(asctime)s.%(msecs)03d TP0] %(levelprefix)s%(message)s", datefmt="%Y-%m-%d %H:%M:%S"
        )
    )
    handler.addFilter(then)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    figures = Figures(decode_log_interval=header.settings.decode_log_interval)
    lines = Tee(figures, LogLines(figures, device=header.device))
    with consistent():
        for row in recording:
            match row:
                case KeptTurn(at):
                    then.at = at
                    lines.on(Turn(at))
                case KeptResult():
                    then.at = row.at
                case KeptRecord():
                    lines.on(as_record(row, header.fields))
    for note in recording.notes:
        print(f"Note: {note}")
    return 0
