"""Page rows as bytes: what is read from one pool and written to another is the same, for every kind
of cache, page size and order of pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from setpoint.core.cachegroups import CacheGroup, CacheLayout
from setpoint.core.model import CachePart
from setpoint.engine.runner.kv_pool import KVPool
from setpoint.engine.runner.page_rows import PageRows
from setpoint_testing.late_copies import pretend_late

KV = (CachePart("k", 2, 8), CachePart("v", 2, 8))
ONE = CacheLayout((CacheGroup((0, 1, 2), None),), 3, KV)
LATENT = CacheLayout((CacheGroup((0, 1), None),), 2, (CachePart("latent", 1, 24),))
WINDOWS = CacheLayout((CacheGroup((0, 2), None), CacheGroup((1,), 16)), 2, KV)


def pool_of(layout: CacheLayout, page_size: int, dtype: torch.dtype) -> KVPool:
    pool = KVPool(
        layout, num_pages=12, page_size=page_size, dtype=dtype, device=torch.device("cpu")
    )
    whole = pool.memory.view(torch.uint8)
    whole[:] = torch.randint(0, 255, whole.shape, dtype=torch.uint8)
    return pool


def pages_of(pool: KVPool, rows: np.ndarray) -> list[bytes]:
    """The content of every layer of these rows, column by column; nothing for page 0."""
    found = []
    for layer, parts in enumerate(pool.layers):
        column = rows.reshape(-1, len(pool.layout.groups))[:, pool.group_of[layer]]
        for page in column[column != 0].tolist():
            found += [part[page].contiguous().view(torch.uint8).numpy().tobytes() for part in parts]
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float64])
@pytest.mark.parametrize("layout", [ONE, LATENT, WINDOWS], ids=["one", "latent", "windows"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_rows_go_from_pool_to_pool(layout: CacheLayout, page_size: int, dtype: torch.dtype) -> None:
    source, target = pool_of(layout, page_size, dtype), pool_of(layout, page_size, dtype)
    width = len(layout.groups)
    read = np.array([3, 4, 5, 9, 1, 2], np.int32)
    rows = np.repeat(read, width).reshape(-1, width)
    into = np.repeat(np.array([7, 8, 2, 1, 10, 11], np.int32), width).reshape(-1, width)
    if width > 1:  # the pages of a row differ, and some are before the window
        rows, into = rows[:3], into[:3]
        rows[:, 1] = [10, 11, 12]
        into[:, 1] = [0, 4, 12]
    data = PageRows(source).read(rows.ravel())
    assert len(data) == len(rows) * PageRows(source).row_bytes
    before = pages_of(target, np.full(width, 3, np.int32))
    PageRows(target).write(into.ravel(), data)
    expected = rows.copy()
    expected[into == 0] = 0
    assert pages_of(target, into) == pages_of(source, expected)
    last = np.array([6, 5][:width], np.int32)
    PageRows(target).write(last, data, first=len(rows) - 1)
    assert pages_of(target, last) == pages_of(source, rows[-1])
    assert pages_of(target, np.full(width, 3, np.int32)) == before


@pytest.mark.parametrize("layout", [ONE, LATENT, WINDOWS], ids=["one", "latent", "windows"])
def test_copies_of_a_device_are_complete_when_they_return(
    layout: CacheLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through blocks of three pages, on a device whose copies are as late as they may be."""
    source, target = (pool_of(layout, 4, torch.bfloat16) for _ in range(2))
    width = len(layout.groups)
    rows = np.repeat(np.array([3, 4, 5, 9, 1, 2, 8, 11], np.int32), width)
    into = np.repeat(np.array([7, 8, 2, 1, 10, 11, 3, 4], np.int32), width)
    into[::3] = 0  # pages before the window
    expected = PageRows(source).read(rows)
    largest = max(part[0].nbytes for parts in source.slabs for part in parts)
    device = pretend_late(monkeypatch, 3 * largest)
    reader, writer = PageRows(source), PageRows(target)
    assert (reader.read(rows) == expected).all()
    writer.write(into, expected)
    assert not device.queue, "a page may be read at once"
    assert device.num_turns == 2, "it waits once for the steps of before"
    kept = np.where(into == 0, 0, rows)
    assert pages_of(target, into.reshape(-1, width)) == pages_of(source, kept.reshape(-1, width))
    assert device.pinned == [3 * largest] * 8, "blocks for reading and for writing"
