"""Processes that are killed while they write blocks: what they leave is right or is not there."""

from __future__ import annotations

import mmap
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from setpoint.tiers.file_store import FileStore
from setpoint_testing.block_writer import LIMITS, STAGES, is_right, keys_of


def killed_writer(folder: Path, life: int, rng: random.Random) -> tuple[int, str]:
    """Kill a writer that has begun to write. Returns the number of transfers that it has told of,
    and what it was doing."""
    stage = folder.parent / "stage"
    command = [sys.executable, "-m", "setpoint_testing.block_writer", str(folder), str(life)]
    with subprocess.Popen([*command, str(stage)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        told = [writer.stdout.readline() for _ in range(rng.randrange(1, 4))]
        _await_stage(stage, rng.choice([1, 1, 2, 3]))
        writer.send_signal(signal.SIGKILL)
        told += writer.stdout.readlines()
        assert writer.wait(30) == -signal.SIGKILL
    return len(told), STAGES[stage.read_bytes()[0]]


def _await_stage(path: Path, wanted: int) -> None:
    """Until the writer does this; it writes all the time."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ) as stage:
        deadline = time.monotonic() + 30
        while stage[0] != wanted and time.monotonic() < deadline:
            pass


def checked(folder: Path, num_told: dict[int, int]) -> Counter[str]:
    """Read every block that the writers may have written."""
    found: Counter[str] = Counter()
    store = FileStore(folder, b"r" * 16, LIMITS)
    store.sweep()
    for life, number in num_told.items():
        for transfer in range(number + 2):
            for key in keys_of(life, transfer):
                data = store.get(key)
                found[
                    "missing" if data is None else "right" if is_right(key, data) else "wrong"
                ] += 1
    found["damaged"] = store.counts.damaged
    found["files"] = len(list(folder.glob("blocks/??/*.kv")))
    found["indexed"] = store.size()[0]
    found["half-written"] = len(list((folder / "new").iterdir()))
    store.close()
    return found


@pytest.mark.parametrize(
    "count", [5, pytest.param(100, marks=[pytest.mark.full, pytest.mark.timeout(1800)])]
)
def test_what_killed_writers_leave_is_right(tmp_path: Path, count: int) -> None:
    rng, folder = random.Random(count), tmp_path / "cache"
    stages: Counter[str] = Counter()
    num_told: dict[int, int] = {}
    totals: Counter[str] = Counter()
    for life in range(count):
        num_told[life], stage = killed_writer(folder, life, rng)
        stages[stage] += 1
        if life % 10 == 9 or life == count - 1:
            recent = {each: num_told[each] for each in list(num_told)[-10:]}
            found = checked(folder, recent)
            assert found["wrong"] == found["damaged"] == 0, found
            assert found["files"] == found["indexed"] > 0, found
            totals.update(found)
    print(f"{count} kills: {dict(stages)}; {dict(totals)}")
    assert totals["right"] > 5 * count
    assert stages.total() - stages["between blocks"] > 0.5 * count, stages
