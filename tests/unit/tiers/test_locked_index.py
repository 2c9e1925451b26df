"""The index of a file store while another process keeps its lock, or has put a strange page into
it: nothing waits for ever, and nothing says that it is done when it is not."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from setpoint.tiers import block_index
from setpoint.tiers.block_keys import KEY_BYTES
from setpoint.tiers.file_store import FileLimits, FileStore
from setpoint.tiers.mover import Tier

LIMITS = FileLimits(max_bytes=1 << 30, min_free_bytes=0)
OWNER = b"o" * 16
HOLDER = """
import lmdb, sys
index = lmdb.open(sys.argv[1], max_dbs=2, map_size=1 << 30)
with index.begin(write=True):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_index, "LOCK_S", 0.5)


def key(number: int) -> bytes:
    return bytes([number] * KEY_BYTES)


def block(number: int) -> np.ndarray:
    return np.full(60, number, np.uint8)


def filled(folder: Path) -> FileStore:
    store = FileStore(folder, OWNER, LIMITS)
    store.sweep()
    for number in range(4):
        assert store.put(key(number), block(number))
    return store


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Another process keeps the lock of the index, as one that was stopped in a change does."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder / "index")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"held\n"
        try:
            yield
        finally:
            process.stdin.close()
            process.wait()


def test_what_is_cleared_is_gone_although_the_index_is_locked(tmp_path: Path) -> None:
    """Red before: it waited for as long as the lock was held."""
    store = filled(tmp_path)
    with held(tmp_path):
        assert store.clear() == 4
        assert store.size() == (0, 0)
        assert not [*tmp_path.glob("blocks/??/*.kv")]
        assert store.put(key(1), block(1))
    assert store.num_leading([key(1)]) == 1
    store.close()


def test_a_start_does_not_wait_for_a_lock(tmp_path: Path) -> None:
    """Red before: it waited for a minute, and then there was no cache."""
    filled(tmp_path).close()
    with held(tmp_path):
        store = FileStore(tmp_path, OWNER, LIMITS)
        store.sweep()
        assert store.num_leading([key(number) for number in range(4)]) == 4
        store.close()


def test_a_page_of_another_kind_costs_the_index_and_not_the_tier(tmp_path: Path) -> None:
    """Red before: LMDB took the page for one of a larger map, and the tier was switched off."""
    store = filled(tmp_path)
    tier = Tier("storage", store)
    path = tmp_path / "index" / "data.mdb"
    with path.open("r+b") as file:  # both pages that say how large the map is
        file.write(random.Random(1).randbytes(2 * 4096))
    for _ in range(8):
        for number in range(4):
            found = tier.try_(lambda store: store.get(key(number)))  # noqa: B023
            assert found is None or (found == block(number)).all()
            tier.try_(lambda store: store.put(key(number), block(number)))  # noqa: B023
    assert not tier.off
    assert store.num_leading([key(number) for number in range(4)]) == 4
    store.close()
