"""``python -m setpoint_testing.block_writer FOLDER LIFE STAGE``: saves made-up pages to a file store for
ever, with the real mover and store, to be killed at any moment.

What it writes follows from LIFE and a count, so that others can tell whether a block is right
(``block_of``). In the file STAGE it notes what it is doing; the note outlives the process.
"""

from __future__ import annotations

import mmap
import queue
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from setpoint.core.prefix_digest import grown
from setpoint.core.request import Ids, pack_ids
from setpoint.core.transfers import Direction, KVLocation, Transfer
from setpoint.tiers import file_store
from setpoint.tiers.block_keys import block_keys
from setpoint.tiers.file_store import FileLimits, FileStore
from setpoint.tiers.mover import StoreMover, Tier
from setpoint.tiers.store import Bytes

BLOCK, NUM_BLOCKS = 8, 6
ROW_BYTES = 1 << 15
IDENTITY = b"a writer"
LIMITS = FileLimits(max_bytes=24 << 20, min_free_bytes=0)
STAGES = ("between blocks", "writing a file", "renaming it", "changing the index")


def ids_of(life: int, number: int) -> Ids:
    """The tokens of a transfer."""
    rng = np.random.default_rng((life, number))
    return rng.integers(0, 1000, BLOCK * NUM_BLOCKS).astype(np.int32)


def digests_of(life: int, number: int) -> bytes:
    return grown(b"", pack_ids(ids_of(life, number)), "", block=BLOCK)


def keys_of(life: int, number: int) -> list[bytes]:
    return block_keys(IDENTITY, digests_of(life, number))


def row_of(life: int, number: int, row: int) -> Bytes:
    """The bytes of one page row: where it belongs, and noise."""
    noise = np.random.default_rng((life, number, row)).bytes(ROW_BYTES // 64) * 64
    head = np.array([life, number, row], "<i8").tobytes()
    return np.frombuffer(head + noise[len(head) :], np.uint8)


def is_right(key: bytes, data: Bytes) -> bool:
    """Whether a block is one that a writer has made, as a whole, under its name."""
    rows = data[1:].reshape(BLOCK, ROW_BYTES)
    life, number, first = np.frombuffer(rows[0, :24].tobytes(), "<i8").tolist()
    expected = np.stack([row_of(life, number, first + at) for at in range(BLOCK)])
    return keys_of(life, number)[first // BLOCK] == key and bool((rows == expected).all())


class MadeUpRows:
    """Implements ``tiers.mover.PoolRows`` over pages that are made up when they are read."""

    width = 1
    row_bytes = ROW_BYTES

    def __init__(self, life: int) -> None:
        self._life = life
        self.number = 0
        """The transfer whose rows are read."""

    def read(self, rows: Ids) -> Bytes:
        return np.concatenate([row_of(self._life, self.number, row - 1) for row in rows.tolist()])

    def write(self, rows: Ids, data: Bytes, *, first: int = 0) -> None:
        raise NotImplementedError("a writer loads nothing")


def main() -> None:
    folder, life, path = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    path.write_bytes(b"\0")
    with path.open("r+b") as file:
        stage = mmap.mmap(file.fileno(), 1)
    file_store._write = _noting(stage, 1, 2, file_store._write)
    FileStore._change = _noting(stage, 3, 0, FileStore._change)  # type: ignore[method-assign]
    ended: queue.Queue[object] = queue.Queue()
    rows = MadeUpRows(life)
    mover = StoreMover(
        [Tier("storage", FileStore(folder, b"w" * 16, LIMITS))],
        lambda: rows,
        block=BLOCK,
        page_size=1,
        post=ended.put,
    )
    mover.serve_as(IDENTITY)
    for number in count():
        rows.number = number
        pages = np.arange(1, BLOCK * NUM_BLOCKS + 1, dtype=np.int32)
        mover.save(
            Transfer(
                number + 1,
                Direction.SAVE,
                KVLocation.STORAGE,
                pages,
                0,
                ids_of(life, number),
                "",
                digests_of(life, number),
            )
        )
        ended.get()
        print(number, flush=True)


def _noting(stage: mmap.mmap, within: int, after: int, act: Callable[..., Any]) -> Any:
    def noted(*arguments: Any) -> Any:
        stage[0] = within
        try:
            return act(*arguments)
        finally:
            stage[0] = after

    return noted


if __name__ == "__main__":
    main()
