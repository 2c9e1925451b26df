"""The free list: what it hands out, what it takes back, and that misuse does not pass."""

from __future__ import annotations

import numpy as np
import pytest

from setpoint.scheduler.cache.page_list import PagePool


def test_hands_out_every_page_once_and_never_the_dummy_page() -> None:
    pool = PagePool(5)
    pages = [int(page) for _ in range(5) for page in pool.alloc(1)]
    assert sorted(pages) == [1, 2, 3, 4, 5]
    assert pool.available == 0
    assert pool.check() == []


def test_alloc_is_all_or_nothing() -> None:
    pool = PagePool(3)
    assert pool.alloc(4) is None
    assert pool.available == 3
    assert len(pool.alloc(3)) == 3
    assert pool.alloc(1) is None
    assert len(pool.alloc(0)) == 0


def test_pages_are_an_int32_array_of_the_callers_own() -> None:
    pool = PagePool(4)
    pages = pool.alloc(2)
    assert pages.dtype == np.int32
    kept = pages.copy()
    pages[:] = 0
    pool.free(kept)
    assert pool.check() == []
    assert sorted(pool.alloc(4)) == [1, 2, 3, 4]


def test_a_run_of_pages_stays_a_run() -> None:
    pool = PagePool(8)
    first, second = pool.alloc(3), pool.alloc(3)
    assert [first.tolist(), second.tolist()] == [[1, 2, 3], [4, 5, 6]]
    pool.free(first)
    assert pool.alloc(3).tolist() == [1, 2, 3]


def test_freeing_a_free_page_is_refused() -> None:
    pool = PagePool(4)
    pages = pool.alloc(2)
    pool.free(pages)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(pages[:1])
    assert pool.available == 4


def test_a_pool_needs_a_page() -> None:
    with pytest.raises(ValueError, match="at least one page"):
        PagePool(0)


def test_check_sees_a_page_listed_twice() -> None:
    pool = PagePool(4)
    pool.free(np.repeat(pool.alloc(1), 1))
    pool._free[0] = pool._free[1]
    assert any("twice" in problem for problem in pool.check())


def test_any_free() -> None:
    pool = PagePool(4)
    pages = pool.alloc(2)
    assert not pool.any_free(pages)
    pool.free(pages[:1])
    assert pool.any_free(pages)
    assert not pool.any_free(np.zeros(0, np.int32))
