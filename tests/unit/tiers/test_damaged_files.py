"""Bytes of a cache's folder that have changed, at random places: no block is ever taken for another."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from setpoint.tiers.file_store import HEADER_BYTES, FileLimits, FileStore

NUM_BLOCKS = 40
LIMITS = FileLimits(1 << 30, 0)
PLACES = {"magic": 8, "name": 32, "owner": 16, "length": 8, "checksum": 16, "header's sum": 8}
"""Part of a block's header -> its bytes, in order."""


def key(number: int) -> bytes:
    return random.Random(number).randbytes(32)


def block(number: int) -> np.ndarray:
    rng = np.random.default_rng(number)
    return rng.integers(0, 256, 200 + 300 * number, dtype=np.uint8)


def filled(folder: Path) -> FileStore:
    store = FileStore(folder, b"o" * 16, LIMITS)
    for number in range(NUM_BLOCKS):
        store.put(key(number), block(number))
    return store


def changed(data: bytes, other: bytes, how: str, rng: random.Random) -> bytes:
    """A block's file after something has happened to it."""
    begin = 0
    for place, size in PLACES.items():
        if how == place:
            at = begin + rng.randrange(size)
            return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        begin += size
    assert begin == HEADER_BYTES
    at = rng.randrange(HEADER_BYTES, len(data))
    end = min(at + rng.randrange(1, 4096), len(data))
    match how:
        case "payload":
            return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        case "cut":
            return data[: rng.randrange(len(data))]
        case "zeros":  # what a file system may leave after a power failure
            return data[:at] + bytes(end - at) + data[end:]
        case "another's":
            return other
        case "another's payload":
            return data[:HEADER_BYTES] + other[HEADER_BYTES:]
        case _:
            return data + rng.randbytes(rng.randrange(1, 100))


HOW = [*PLACES, "payload", "payload", "payload", "cut", "cut", "cut", "zeros", "another's"]
HOW += ["another's payload", "longer"]


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.full)])
def test_no_changed_file_is_taken_for_its_block(tmp_path: Path, count: int) -> None:
    rng, store = random.Random(count), filled(tmp_path)
    seen: Counter[str] = Counter()
    for _ in range(count):
        number, other = rng.sample(range(NUM_BLOCKS), 2)
        path = store._path(key(number))
        whole, how = path.read_bytes(), rng.choice(HOW)
        new = changed(whole, store._path(key(other)).read_bytes(), how, rng)
        path.write_bytes(new)
        found = store.get(key(number))
        if new == whole:
            assert found is not None
        else:
            assert found is None, how
            seen[how] += 1
            assert not path.exists()
            store.put(key(number), block(number))
        assert (store.get(key(number)) == block(number)).all()  # type: ignore[union-attr]
    print(f"{seen.total()} changed files, 0 taken: {dict(seen)}")
    assert store.counts.damaged == seen.total() > 0.9 * count
    assert seen.keys() == {*HOW}
