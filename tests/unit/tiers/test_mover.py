"""The threads that move pages: between two pools through stores, host tier included, with stores that
fail."""

from __future__ import annotations

import logging
import queue
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from setpoint.core.cachegroups import CacheGroup, CacheLayout
from setpoint.core.messages import PagesMoved, PrefixFound
from setpoint.core.model import CachePart
from setpoint.core.prefix_digest import grown
from setpoint.core.request import pack_ids
from setpoint.core.transfers import Direction, KVLocation, Transfer
from setpoint.engine.runner.kv_pool import KVPool
from setpoint.engine.runner.page_rows import PageRows
from setpoint.tiers.block_keys import block_keys
from setpoint.tiers.file_store import FileLimits, FileStore
from setpoint.tiers.memory_store import MemoryStore
from setpoint.tiers.mover import MAX_ERRORS, StoreMover, Tier
from setpoint.tiers.store import StoreError

LAYOUT = CacheLayout(
    (CacheGroup((0, 1), None), CacheGroup((2, 3), 12)),
    2,
    (CachePart("k", 2, 4), CachePart("v", 2, 4)),
)
BLOCK, PAGE = 8, 4
IDS = np.arange(30, dtype=np.int32)


class Movers:
    """A mover over a pool of its own."""

    def __init__(self, *tiers: Tier, seed: int = 0, identity: bytes = b"i") -> None:
        self.pool = KVPool(
            LAYOUT,
            num_pages=40,
            page_size=PAGE,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
        )
        whole = self.pool.memory.view(torch.uint8)
        torch.manual_seed(seed)
        whole[:] = torch.randint(0, 255, whole.shape, dtype=torch.uint8)
        self.inbox: queue.Queue[PrefixFound | PagesMoved] = queue.Queue()
        self.mover = StoreMover(
            tiers, lambda: PageRows(self.pool), block=BLOCK, page_size=PAGE, post=self.inbox.put
        )
        self.mover.serve_as(identity)

    def moved(self) -> PagesMoved:
        found = self.inbox.get(timeout=30)
        assert isinstance(found, PagesMoved)
        return found

    def num_found(self, ids: np.ndarray = IDS) -> int:
        self.mover.look_up(1, digests_of(ids))
        found = self.inbox.get(timeout=30)
        assert isinstance(found, PrefixFound)
        return found.num_tokens


def transfer(direction: Direction, rows: np.ndarray, start: int, end: int) -> Transfer:
    ids = IDS[:end]
    return Transfer(1, direction, KVLocation.STORAGE, rows.ravel(), start, ids, "", digests_of(ids))


def digests_of(ids: np.ndarray) -> bytes:
    return grown(b"", pack_ids(ids), "", block=BLOCK)


def file_tier(folder: Path) -> Tier:
    return Tier("storage", FileStore(folder, b"o" * 16, FileLimits(1 << 30, 0)))


ROWS = np.array([[1, 20], [2, 21], [5, 22], [6, 23], [7, 24], [9, 25]], np.int32)
INTO = np.array([[11, 30], [12, 31], [13, 32], [14, 33], [15, 34], [16, 35]], np.int32)


@pytest.mark.parametrize("host", [False, True])
def test_pages_go_through_stores(tmp_path: Path, host: bool) -> None:
    memory = [Tier("host", MemoryStore(1 << 20))] if host else []
    first = Movers(*memory, file_tier(tmp_path))
    first.mover.save(transfer(Direction.SAVE, ROWS, 0, 24))
    assert first.moved().num_tokens == 24
    for each in first.mover.tiers:
        assert each.store.size()[0] == 3
        each.store.close() if each.name != "host" else None
    second = Movers(*memory, file_tier(tmp_path), seed=1)
    assert second.num_found() == 24
    second.mover.load(transfer(Direction.LOAD, INTO[3:], 12, 24))
    moved = second.moved()
    assert (moved.num_tokens, moved.why) == (12, "")
    assert moved.from_host == (12 if host else 0)
    source, target = PageRows(first.pool), PageRows(second.pool)
    assert (target.read(INTO[3:].ravel()) == source.read(ROWS[3:].ravel())).all()
    assert not (target.read(INTO[:3].ravel()) == source.read(ROWS[:3].ravel())).all()


def test_another_engine_finds_nothing(tmp_path: Path) -> None:
    first = Movers(file_tier(tmp_path))
    first.mover.save(transfer(Direction.SAVE, ROWS, 0, 24))
    first.moved()
    first.mover.serve_as(b"other weights")
    assert first.num_found() == 0
    first.mover.serve_as(b"")
    assert first.num_found() == 0
    first.mover.save(transfer(Direction.SAVE, ROWS, 0, 24))
    assert first.moved() == PagesMoved(1, 0, 0, pytest.approx(0, abs=60), "cancelled")


def test_pages_that_a_window_gave_back_are_missed_where_they_are_needed() -> None:
    tier = Tier("host", MemoryStore(1 << 20))
    each = Movers(tier)
    rows = ROWS.copy()
    rows[:3, 1] = 0
    each.mover.save(transfer(Direction.SAVE, rows, 0, 24))
    assert each.moved().num_tokens == 24
    wanted = INTO.copy()
    wanted[:3, 1] = 0
    each.mover.load(transfer(Direction.LOAD, wanted, 0, 24))
    assert each.moved().num_tokens == 24
    each.mover.load(transfer(Direction.LOAD, INTO[:4], 0, 16))
    assert each.moved().num_tokens == 0


def test_a_damaged_block_ends_a_load_before_it(tmp_path: Path) -> None:
    each = Movers(file_tier(tmp_path))
    each.mover.save(transfer(Direction.SAVE, ROWS, 0, 24))
    each.moved()
    name = block_keys(b"i", digests_of(IDS))[1].hex()
    (path,) = tmp_path.glob(f"blocks/??/{name}.kv")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    each.mover.load(transfer(Direction.LOAD, INTO, 0, 24))
    moved = each.moved()
    assert (moved.num_tokens, moved.why) == (8, "a block is missing")
    assert each.mover.counts.damaged == 1
    assert each.num_found() == 8


class Failing(MemoryStore):
    def get(self, key: bytes) -> np.ndarray | None:
        raise StoreError("it does not answer")


def test_a_store_that_fails_again_and_again_is_off() -> None:
    tier = Tier("storage", Failing(1 << 20))
    each = Movers(tier)
    each.mover.save(transfer(Direction.SAVE, ROWS, 0, 24))
    assert each.moved().num_tokens == 24
    for _ in range(3):
        assert not tier.off
        each.mover.load(transfer(Direction.LOAD, INTO, 0, 24))
        assert each.moved().num_tokens == 0
    assert "3 errors in a row" in tier.off
    assert each.num_found() == 0


def test_asking_for_its_size_keeps_no_dead_store_in_use() -> None:
    """The size of a store of another process is counted here, whether that process answers or not."""
    tier = Tier("storage", Failing(1 << 20))
    for _ in range(MAX_ERRORS):
        assert tier.try_(lambda store: store.get(b"key")) is None
        assert tier.try_(lambda store: store.size(), proves=False) is not None or tier.off
    assert f"{MAX_ERRORS} errors in a row" in tier.off


def test_a_storage_that_is_detached_during_a_load_ends_the_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Red before: an IndexError in the log."""
    tier = file_tier(tmp_path)
    each = Movers(tier)
    each.mover.save(transfer(Direction.SAVE, ROWS, 0, 24))
    each.moved()
    get = tier.store.get

    def detaching(key: bytes) -> np.ndarray | None:
        found = get(key)
        if each.mover.tiers:
            each.mover.detach(tier)
        return found

    tier.store.get = detaching  # type: ignore[method-assign]
    each.mover.load(transfer(Direction.LOAD, INTO, 0, 24))
    moved = each.moved()
    assert (moved.num_tokens, moved.why) == (BLOCK, "a block is missing")
    assert not [each for each in caplog.records if each.levelno > logging.INFO]


def test_a_folder_that_was_given_up_is_used_again(tmp_path: Path) -> None:
    """Red before: its index stayed open, which was taken for damage, and it was made again."""
    each = Movers(file_tier(tmp_path))
    each.mover.save(transfer(Direction.SAVE, ROWS, 0, 24))
    each.moved()
    index = (tmp_path / "index" / "data.mdb").stat().st_ino
    for _ in range(3):
        each.mover.detach(each.mover.tiers[0])
        deadline = time.monotonic() + 30
        while not (tmp_path / "index" / "closed").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        each.mover.attach(file_tier(tmp_path))
        assert each.num_found() == 24
    assert (tmp_path / "index" / "data.mdb").stat().st_ino == index
    assert not list(tmp_path.glob("index.bad.*"))


def test_tokens_that_no_store_takes_are_not_saved(tmp_path: Path) -> None:
    """Red before: tokens of blocks that were refused, or had no store, counted as saved."""
    full = Tier("storage", FileStore(tmp_path, b"o" * 16, FileLimits(10, 0)))
    off = Tier("storage", MemoryStore(0))
    off.switch_off("it needs a folder")
    for tiers, why in (
        ((full,), "refused or failed"),
        ((off,), "the tiers are off"),
        ((), "no storage in use"),
    ):
        each = Movers(*tiers)
        each.mover.save(transfer(Direction.SAVE, ROWS, 0, 24))
        moved = each.moved()
        assert (moved.num_tokens, moved.num_bytes, moved.why) == (0, 0, why)
    both = Movers(full, Tier("host", MemoryStore(1 << 20)))
    for _ in range(2):  # the second time it is there
        both.mover.save(transfer(Direction.SAVE, ROWS, 0, 24))
        assert (both.moved().num_tokens, both.mover.tiers[0].saved_tokens) == (24, 0)
