"""Random transfers against a cache: pages are held until each has ended, whatever happens between."""

from __future__ import annotations

import random

import numpy as np
import pytest

from setpoint.core.messages import PagesMoved
from setpoint.core.pagerows import PageRow, WindowColumns
from setpoint.core.transfers import Direction, KVLocation
from setpoint.scheduler.cache.manager import KVCache
from setpoint.scheduler.transfers import Transfers
from setpoint_testing.harness import Recorder

ROWS = (
    PageRow(),
    PageRow(1, (WindowColumns(5, 1, 3),), read_step=2),
    PageRow(2, (WindowColumns(3, 2, 3), WindowColumns(9, 3, 4)), read_step=1),
)


def tokens(rng: random.Random) -> np.ndarray:
    return np.array([rng.randrange(2) for _ in range(rng.randrange(1, 14))], np.int32)


@pytest.mark.cases(30)
@pytest.mark.parametrize("seed", range(60))
def test_pages_are_held_until_the_end_of_each_transfer(seed: int) -> None:
    rng = random.Random(seed)
    page_size, row = rng.choice([1, 2, 4]), rng.choice(ROWS)
    cache = KVCache(num_pages=48, page_size=page_size, row=row)
    transfers = Transfers(cache, Recorder())
    ended: list[int] = []
    open_ids: list[int] = []
    for _ in range(300):
        match rng.choice(["reserve", "hold", "end", "end", "flush", "compute", "free"]):
            case "reserve":
                found = transfers.reserve(
                    KVLocation.STORAGE,
                    tokens(rng),
                    rng.choice(["", "s"]),
                    lambda *_: ended.append(1),
                )
                open_ids += [] if found is None else [found.id]
            case "hold":
                start = rng.randrange(3) * page_size
                found = transfers.hold(
                    KVLocation.STORAGE, tokens(rng), "", start, lambda *_: ended.append(1)
                )
                open_ids += [] if found is None else [found.id]
                assert found is None or len(found.ids) > found.start
            case "end" if open_ids:
                at = open_ids.pop(rng.randrange(len(open_ids)))
                transfers.end(PagesMoved(at, rng.randrange(16)))
                transfers.end(PagesMoved(at, 3))  # a second one changes nothing
            case "flush" if rng.random() < 0.2:
                cache.flush()
                transfers.flush()
                assert not cache.locked_tokens
                assert not cache.evictable_tokens
            case "compute":
                compute(cache, tokens(rng))
            case "free":
                pages = cache.alloc(rng.randrange(8))
                if pages is not None:
                    cache.free(pages)
        pool = cache.pool_stats()
        assert pool.held == transfers.num_held_pages * page_size
        assert not cache.check()
        reserved = [
            transfers[at].rows for at in open_ids if transfers[at].direction is Direction.LOAD
        ]
        written = np.concatenate([np.zeros(0, np.int32), *reserved])
        assert len(np.unique(written[written != 0])) == np.count_nonzero(written)
    while open_ids:
        transfers.end(PagesMoved(open_ids.pop(), 100))
    assert not transfers
    assert not transfers.num_held_pages
    pool = cache.pool_stats()
    assert pool.free + pool.evictable == pool.total
    assert not cache.check()


def compute(cache: KVCache, ids: np.ndarray) -> None:
    """Leave a computed prefix in the tree, as a sequence does."""
    page, width = cache.page_size, cache.row.width
    ids = ids[: len(ids) // page * page]
    with cache.match(ids) as handle:
        new = (len(ids) - handle.num_tokens) // page
        pages = cache.alloc(new * width)
        if pages is None:
            return
        first, before = handle.num_tokens // page, handle.pages()
        rows = np.concatenate((before, pages))
        cache.free(cache.extend(handle, ids, rows))
        if cache.row.windows:
            own = pages.reshape(-1, width)[:, cache.row.num_full :]
            cache.give_back(handle, own.ravel(), first)


def test_what_a_load_brings_is_matched_like_what_was_computed() -> None:
    cache = KVCache(num_pages=32, page_size=2)
    transfers, reached = Transfers(cache, Recorder()), []
    ids = np.arange(9, dtype=np.int32)
    load = transfers.reserve(KVLocation.STORAGE, ids, "", lambda *found: reached.append(found[0]))
    assert load is not None
    assert (load.start, len(load.ids), len(load.rows)) == (0, 8, 4)
    assert cache.pool_stats().held == 8
    transfers.end(PagesMoved(load.id, 5))
    assert reached == [4], "whole pages only"
    assert cache.peek(ids) == 4
    assert cache.pool_stats().held == 0
    rest = transfers.reserve(KVLocation.STORAGE, ids, "", lambda *found: reached.append(found[0]))
    assert rest is not None
    assert rest.start == 4
    assert cache.locked_tokens == 4
    transfers.flush()
    transfers.end(PagesMoved(rest.id, 4))
    assert reached == [4, 0]
    assert cache.peek(ids) == 0
    assert cache.free_tokens == 64


def test_a_load_that_does_not_fit_holds_nothing() -> None:
    cache = KVCache(num_pages=4, page_size=1)
    transfers = Transfers(cache, Recorder())
    assert transfers.reserve(KVLocation.HOST, np.arange(5, dtype=np.int32), "", print) is None
    assert transfers.hold(KVLocation.HOST, np.arange(5, dtype=np.int32), "", 0, print) is None
    assert cache.free_tokens == 4
