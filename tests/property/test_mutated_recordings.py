"""Recordings of which parts were exchanged: every reader either reads one or says in one line of
its own error that it cannot."""

from __future__ import annotations

import contextlib
import io
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from setpoint.commands.replay_command import replay
from setpoint.config.command_options import ReplayOptions
from setpoint.core.errors import RecordingError, SourceError
from setpoint.doctor.readers.recording import open_source, read_recording
from setpoint.playback.film import Film
from setpoint.recording.format import OFF, ON
from setpoint.recording.frames import FrameReader, frame
from setpoint_testing.harness import Harness
from setpoint_testing.recordings import record

VALUES: tuple[Any, ...] = (
    *(None, -1, 0, 1, 2**31, 2**40, 2**62, -(2**62), 1e300, float("nan"), float("inf")),
    *("x", "", b"", b"xyz", [], {}, [1], True, False),
)


def print_and_replay(path: Path) -> None:
    for is_printed in (False, True):
        replay(ReplayOptions(file=str(path), print=is_printed))


def show(path: Path) -> None:
    film = Film(str(path))
    film.recording()
    film.at(film.seen.ranks[0].moments[-1].at)


READERS: tuple[Callable[[Path], Any], ...] = (
    print_and_replay,
    lambda path: read_recording(open_source(str(path)), path.name),
    show,
)


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    harness = Harness(num_pages=64, depth=1, chunked_prefill_size=8)
    for number in range(6):
        harness.submit(f"a{number}", [1, 2, 3, number] * 3, max_new_tokens=6)
        harness.turn(2)
    harness.drain()
    folder = tmp_path_factory.mktemp("runs")
    return [record(harness, folder / each, content=each).read_bytes() for each in (OFF, ON)]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the parts of a value are."""
    inner = enumerate(value) if isinstance(value, list) else ()
    for key, each in value.items() if isinstance(value, dict) else inner:
        yield (*path, key)
        yield from places(each, (*path, key))


def mutated(data: bytes, draw: random.Random) -> bytes:
    parts = [msgspec.msgpack.decode(payload) for payload in FrameReader(data)]
    for _ in range(draw.choice([1, 1, 2])):
        part = parts[0 if draw.random() < 0.4 else draw.randrange(len(parts))]
        *path, last = draw.choice(list(places(part)))
        for key in path:
            part = part[key]
        if draw.random() < 0.1:
            del part[last]
        else:
            part[last] = draw.choice(VALUES)
    whole = b"".join(frame(msgspec.msgpack.encode(part)) for part in parts)
    return whole[: draw.randrange(len(whole))] if draw.random() < 0.1 else whole


def check(recordings: list[bytes], path: Path, seeds: range) -> None:
    """Red before: ValidationError, OverflowError, MemoryError, ZeroDivisionError and others."""
    refusals: list[str] = []
    handlers = list(logging.getLogger().handlers)
    for seed in seeds:
        draw = random.Random(seed)
        path.write_bytes(mutated(draw.choice(recordings), draw))
        for read in READERS:
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    read(path)
            except (RecordingError, SourceError) as error:
                refusals.append(str(error))
            finally:
                logging.disable(logging.NOTSET)
                logging.getLogger().handlers[:] = handlers  # printing a log sets its own
    assert not [each for each in refusals if "\n" in each]
    assert len(refusals) > len(seeds) // 4


def test_readers_read_or_refuse(recordings: list[bytes], tmp_path: Path) -> None:
    check(recordings, tmp_path / "run", range(300))


@pytest.mark.full
def test_readers_read_or_refuse_very_many(recordings: list[bytes], tmp_path: Path) -> None:
    check(recordings, tmp_path / "run", range(300, 4000))
