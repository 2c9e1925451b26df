"""The files of a recording: what a crash, damage, a full disk or a limit leaves of them."""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from setpoint.core.errors import RecordingError
from setpoint.core.messages import Shutdown, Stop
from setpoint.core.records import Received, Turn
from setpoint.recording import segments, writer
from setpoint.recording.format import ON, KeptPlan
from setpoint.recording.frames import FrameReader, frame
from setpoint.recording.kept_content import Open
from setpoint.recording.recording_reader import open_recording
from setpoint.recording.replay import Replay
from setpoint.recording.segments import Segments
from setpoint.recording.writer import RecordingWriter
from setpoint_testing.harness import Harness
from setpoint_testing.recordings import record, replayed


def short_run() -> Harness:
    harness = Harness()
    harness.submit("a", [1, 2, 3], max_new_tokens=5)
    harness.drain()
    return harness


def in_frames(path: Path, num_records: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recording of a short run with a frame for every ``num_records``."""
    monkeypatch.setattr(writer, "FRAME_RECORDS", num_records)
    return record(short_run(), path)


def test_a_torn_tail_is_dropped_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torn at every byte of the last three frames: what is whole replays without a difference."""
    whole = in_frames(tmp_path / "whole", 4, monkeypatch).read_bytes()
    ends = [0]
    reader = FrameReader(whole)
    for _ in reader:
        ends.append(reader.end)
    torn = tmp_path / "torn"
    seen = set()
    for end in range(ends[-4], len(whole)):
        torn.write_bytes(whole[:end])
        recording = open_recording(torn)
        outcome = Replay(recording).run()
        assert outcome.agrees, (end, outcome)
        assert len(recording.notes) == (end not in ends), end
        seen.add(outcome.num_steps)
    assert len(seen) > 1


def test_a_flipped_byte_is_damage_unless_it_is_in_the_last_frame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = in_frames(tmp_path / "run", 4, monkeypatch)
    whole = path.read_bytes()
    reader = FrameReader(whole)
    ends = [reader.end for _ in reader]
    for at in range(ends[0], len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
        recording = open_recording(path)
        outcome = Replay(recording).run()
        assert not outcome.difference, at
        in_last = at >= ends[-2]
        assert bool(outcome.damage) != in_last, (at, outcome)
        assert bool(recording.notes) == in_last
    path.write_bytes(b"\0" + whole[1:])
    with pytest.raises(RecordingError, match="not a recording"):
        open_recording(path)


def test_only_the_owner_may_read_and_nothing_is_overwritten(tmp_path: Path) -> None:
    path = record(short_run(), tmp_path / "run")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = path.read_bytes()
    with pytest.raises(RecordingError, match="already"):
        record(short_run(), path)
    assert path.read_bytes() == before
    with pytest.raises(RecordingError, match="no such folder"):
        record(short_run(), tmp_path / "no" / "folder")


def test_another_format_is_refused_by_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = record(short_run(), tmp_path / "run")
    monkeypatch.setattr("setpoint.recording.recording_reader.FORMAT", 77)
    with pytest.raises(RecordingError, match="in format 2; this version reads format 77"):
        open_recording(path)


def test_segments_continue_each_other_and_the_oldest_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    harness = Harness()
    for number in range(80):
        harness.submit(f"r{number}", [number % 9, 1, 2], max_new_tokens=9)
        harness.turn(3)
    harness.drain()
    monkeypatch.setattr(writer, "FRAME_RECORDS", 50)
    plain = record(harness, tmp_path / "plain", content=ON)
    size = plain.stat().st_size
    chain = record(harness, tmp_path / "chain", content=ON, max_bytes=4 * size)
    assert len(list(tmp_path.glob("chain*"))) > 3
    assert replayed(chain).num_steps == replayed(plain).num_steps == len(harness.plans)
    assert list(open_recording(chain)) == list(open_recording(plain))
    assert not caplog.records

    short = record(harness, tmp_path / "short", max_bytes=size // 2)
    there = list(tmp_path.glob("short*"))
    assert sum(path.stat().st_size for path in there) <= size // 2
    assert not short.exists()
    assert "no longer be replayed" in caplog.text
    rest = open_recording(short)
    assert rest.header.segment > 0
    assert [row for row in rest if isinstance(row, KeptPlan)]
    with pytest.raises(RecordingError, match="oldest parts were deleted"):
        Replay(rest)

    sorted(tmp_path.glob("chain.*"))[1].unlink()
    with pytest.raises(RecordingError, match="are missing"):
        open_recording(chain)


write = os.write


def recorder(path: Path) -> RecordingWriter:
    files = Segments(path, header=lambda number: b"\x90", max_bytes=1 << 20)
    return RecordingWriter(files, Open(), flush_s=0.01)


def test_a_recording_that_waits_for_use_begins_with_the_first_message(tmp_path: Path) -> None:
    for name, message in (("unused", Shutdown()), ("used", Stop(1))):
        path = tmp_path / name
        recording = RecordingWriter(
            partial(Segments, path, header=lambda number: b"\x90", max_bytes=1 << 20),
            Open(),
            flush_s=0.01,
        )
        recording.on(Turn(1.0))
        time.sleep(0.1)
        assert not path.exists()
        assert recording.state().num_bytes == 0
        recording.on(Received(message))
        recording.close()
        assert path.exists() == (name == "used")
        assert recording.state().num_records == (2 if name == "used" else 0)
        assert recording.state().ended is None


def test_a_full_disk_ends_the_recording_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recording = recorder(tmp_path / "run")
    room = 3

    def full(file: int, data: bytes) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room -= write(file, data[:room])
        return 3

    monkeypatch.setattr(segments.os, "write", full)
    for number in range(1000):
        recording.on(Turn(float(number)))
    recording.close()
    assert "No space left" in recording.state().ended
    recording.on(Turn(0.0))
    (event,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert "The recording ends here" in event.message
    reader = FrameReader((tmp_path / "run").read_bytes())
    assert list(reader) == [b"\x90"]
    assert reader.num_torn


def test_a_disk_that_does_not_keep_up_ends_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stuck, answer = threading.Event(), threading.Event()
    recording = recorder(tmp_path / "run")

    def slow(file: int, data: bytes) -> int:
        stuck.set()
        assert answer.wait(60)
        return write(file, data)

    monkeypatch.setattr(segments.os, "write", slow)
    recording.on(Turn(0.0))
    assert stuck.wait(60)
    monkeypatch.setattr(writer, "MAX_WAITING", 100)
    for number in range(200):
        recording.on(Turn(float(number)))
    assert "does not keep up" in recording.state().ended
    recording.close(timeout_s=0.01)
    assert "not written" in caplog.text
    answer.set()


def test_a_frame_holds_any_bytes() -> None:
    for payload in (b"", b"\xf0SP\n" * 100, frame(b"inner"), os.urandom(5000)):
        reader = FrameReader(frame(payload) + frame(b"next"))
        assert list(reader) == [payload, b"next"]
        assert not reader.num_torn


def test_records_that_wait_are_written_in_time(tmp_path: Path) -> None:
    recording = recorder(tmp_path / "run")
    recording.on(Turn(1.5))
    for _ in range(1000):
        if recording.state().num_records:
            break
        threading.Event().wait(0.01)
    frames = list(FrameReader((tmp_path / "run").read_bytes()))
    assert len(frames) == 2
    recording.close()


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    """Red before: opening it waited for a writer."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RecordingError, match="pipe is not a file"):
        open_recording(tmp_path / "pipe")
