"""The KV cache as the scheduler uses it: ownership of pages, eviction on demand, and what its
bookkeeping costs."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from setpoint.core.pool import PoolStats
from setpoint.core.request import Ids
from setpoint.scheduler.cache.evict import Lru
from setpoint.scheduler.cache.manager import KVCache
from setpoint.scheduler.cache.node import TreeNode


def ids(*tokens: int) -> Ids:
    return np.array(tokens, np.int32)


def insert(cache: KVCache, tokens: Ids, namespace: str = "") -> None:
    """What a sequence does that computes ``tokens`` and ends."""
    with cache.match(tokens, namespace) as handle:
        own = cache.alloc((len(tokens) - handle.num_tokens) // cache.page_size)
        assert own is not None
        cache.extend(handle, tokens, np.concatenate([handle.pages(), own]))


def counts(cache: KVCache) -> tuple[int, int, int, int]:
    stats = cache.pool_stats()
    assert stats.free + stats.evictable + stats.locked + stats.held == stats.total
    assert (stats.free, stats.evictable, stats.locked) == (
        cache.free_tokens,
        cache.evictable_tokens,
        cache.locked_tokens,
    )
    assert cache.check() == []
    return stats.free, stats.evictable, stats.locked, stats.held


def test_a_page_goes_from_free_to_held_to_locked_to_evictable_to_free() -> None:
    cache = KVCache(num_pages=4, page_size=2)
    assert (cache.total_tokens, counts(cache)) == (8, (8, 0, 0, 0))
    handle = cache.match(ids())
    pages = cache.alloc(2)
    assert counts(cache) == (4, 0, 0, 4)
    assert cache.extend(handle, ids(1, 2, 3, 4), pages).tolist() == []
    assert counts(cache) == (4, 0, 4, 0)
    handle.release()
    handle.release()
    assert counts(cache) == (4, 4, 0, 0)
    assert cache.flush() == 4
    assert counts(cache) == (8, 0, 0, 0)


def test_pool_stats_are_in_tokens() -> None:
    cache = KVCache(num_pages=4, page_size=16)
    cache.alloc(1)
    assert cache.pool_stats() == PoolStats(total=64, free=48, evictable=0, locked=0, held=16)


def test_alloc_evicts_only_what_is_short_and_only_unlocked() -> None:
    cache = KVCache(num_pages=6, page_size=1)
    insert(cache, ids(1, 2))
    insert(cache, ids(3, 4))
    assert len(cache.alloc(2)) == 2
    assert cache.evictable_tokens == 4, "the free list sufficed"
    handle = cache.match(ids(1, 2))
    assert len(cache.alloc(1)) == 1
    assert (cache.peek(ids(1, 2)), cache.peek(ids(3, 4))) == (2, 0)
    assert counts(cache) == (1, 0, 2, 3)
    assert cache.alloc(2) is None
    handle.release()
    assert len(cache.alloc(3)) == 3


def test_alloc_that_cannot_be_met_evicts_nothing() -> None:
    cache = KVCache(num_pages=4, page_size=1)
    insert(cache, ids(1, 2))
    held = cache.alloc(1)
    assert cache.alloc(4) is None
    assert counts(cache) == (1, 2, 0, 1)
    cache.free(held)
    assert len(cache.alloc(4)) == 4


def test_alloc_of_nothing() -> None:
    cache = KVCache(num_pages=1, page_size=1)
    cache.alloc(1)
    assert cache.alloc(0).tolist() == []


def test_duplicates_are_returned_once_and_stay_the_callers() -> None:
    cache = KVCache(num_pages=12, page_size=2)
    tokens = np.arange(8, dtype=np.int32)
    slow = cache.match(tokens)
    table = cache.alloc(4)
    insert(cache, tokens[:4])  # another sequence is faster
    assert cache.extend(slow, tokens[:2], table[:1]).tolist() == table[:1].tolist()
    returned = cache.extend(slow, tokens[:6], table[:3])
    assert returned.tolist() == table[1:2].tolist(), (
        "the first was returned before, the third was adopted"
    )
    assert slow.num_tokens == 6
    assert slow.pages().tolist()[2:] == table[2:3].tolist()
    assert not set(slow.pages().tolist()) & set(table[:2].tolist())
    assert counts(cache) == (12, 0, 6, 6)
    assert cache.extend(slow, tokens[:6], table[:3]).tolist() == [], "again is harmless"
    cache.free(table[:2])  # what extend returned
    cache.free(table[3:])  # what lies beyond handle.num_tokens
    slow.release()
    assert counts(cache) == (18, 6, 0, 0)


def test_extend_does_not_look_at_pages_below_the_handle() -> None:
    cache = KVCache(num_pages=4, page_size=1)
    insert(cache, ids(1, 2))
    handle = cache.match(ids(1, 2))
    own = cache.alloc(1)
    assert cache.extend(handle, ids(1, 2, 3), np.concatenate([ids(0, 0), own])).tolist() == []
    assert handle.pages().tolist()[2:] == own.tolist()
    assert cache.check() == []


def test_extend_keeps_no_view_of_the_callers_arrays() -> None:
    cache = KVCache(num_pages=4, page_size=1)
    handle = cache.match(ids())
    tokens, pages = ids(1, 2), cache.alloc(2)
    kept = pages.tolist()
    cache.extend(handle, tokens, pages)
    tokens[:], pages[:] = 0, 0
    assert handle.pages().tolist() == kept
    assert cache.peek(ids(1, 2)) == 2
    other = cache.match(ids())
    mine = cache.alloc(2)
    returned = cache.extend(other, ids(1, 2), mine)
    mine[:] = 0
    assert returned.all()


def test_extend_refuses_a_torn_call() -> None:
    cache = KVCache(num_pages=4, page_size=2)
    handle = cache.match(ids())
    with pytest.raises(AssertionError, match="fill their pages"):
        cache.extend(handle, ids(1, 2, 3), cache.alloc(1))
    cache.extend(handle, ids(1, 2), cache.alloc(1))
    with pytest.raises(AssertionError, match="longer than ids"):
        cache.extend(handle, ids(), ids())


def test_freeing_twice_is_refused_at_once() -> None:
    cache = KVCache(num_pages=4, page_size=2)
    pages = cache.alloc(2)
    cache.free(pages)
    with pytest.raises(AssertionError, match="freed twice"):
        cache.free(pages)


def test_check_sees_a_tree_page_that_was_freed() -> None:
    cache = KVCache(num_pages=4, page_size=1)
    handle = cache.match(ids())
    pages = cache.alloc(1)
    cache.extend(handle, ids(1), pages)
    cache.free(pages)
    assert "The tree holds a page that is free." in cache.check()


def test_check_sees_a_page_cached_twice_or_out_of_range() -> None:
    for wrong, sentence in (
        (ids(2, 2), "a page twice"),
        (ids(2, 9), "does not exist"),
        (ids(0, 2), "does not exist"),
    ):
        cache = KVCache(num_pages=4, page_size=1)
        cache.alloc(4)
        cache.extend(cache.match(ids()), ids(1, 2), wrong)
        assert any(sentence in problem for problem in cache.check())


def test_check_sees_negative_held() -> None:
    cache = KVCache(num_pages=2, page_size=1)
    cache._tree.extend(cache.match(ids()), ids(1), ids(1))
    assert any("negative" in problem for problem in cache.check())


def test_peek_and_touch_by_namespace() -> None:
    cache = KVCache(num_pages=6, page_size=1)
    insert(cache, ids(1, 2), "a")
    insert(cache, ids(1, 2), "b")
    insert(cache, ids(1, 2))
    cache.touch(ids(1, 2, 3), "a")
    cache.alloc(2)
    assert [cache.peek(ids(1, 2), namespace) for namespace in ("a", "b", "")] == [2, 0, 2]


def test_flush_keeps_what_is_locked() -> None:
    cache = KVCache(num_pages=6, page_size=1)
    insert(cache, ids(1, 2, 3))
    with cache.match(ids(1)):
        assert cache.flush() == 2
        assert cache.peek(ids(1, 2, 3)) == 1
    assert (cache.flush(), cache.flush()) == (1, 0)


def test_reset_starts_over_empty() -> None:
    cache = KVCache(num_pages=4, page_size=2)
    cache.extend(cache.match(ids()), ids(1, 2), cache.alloc(1))
    cache.alloc(1)
    cache.reset()
    assert counts(cache) == (8, 0, 0, 0)
    assert cache.peek(ids(1, 2)) == 0
    assert sorted(cache.alloc(4)) == [1, 2, 3, 4]


def test_disabled_cache_has_the_same_rule_for_callers() -> None:
    cache = KVCache(num_pages=6, page_size=2, enabled=False)
    tokens = np.arange(8, dtype=np.int32)
    handle = cache.match(tokens)
    table = cache.alloc(4)
    private = [cache.extend(handle, tokens[: 2 * num], table[:num]) for num in (1, 3)]
    assert np.concatenate(private).tolist() == table[:3].tolist()
    assert (handle.num_tokens, handle.pages().tolist()) == (6, [])
    assert counts(cache) == (4, 0, 0, 8)
    assert cache.peek(tokens) == 0
    cache.free(np.concatenate(private))
    cache.free(table[handle.num_tokens // 2 :])
    handle.release()
    assert counts(cache) == (12, 0, 0, 0)


@pytest.mark.parametrize("wrong", [{"num_pages": 0}, {"page_size": 0}, {"eviction_policy": "fifo"}])
def test_impossible_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"page|policy"):
        KVCache(**{"num_pages": 4, "page_size": 1, **wrong})


def test_evicting_a_page_per_step_does_not_visit_the_whole_tree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, key = [0], Lru.key

    def counting(policy: Lru, node: TreeNode) -> object:
        calls[0] += 1
        return key(policy, node)

    monkeypatch.setattr(Lru, "key", counting)
    cache = KVCache(num_pages=2000, page_size=1)
    for number in range(2000):
        insert(cache, ids(number))
    before = calls[0]
    for _ in range(100):
        assert cache.alloc(1) is not None
    assert calls[0] - before == 100


def test_bytes_per_cached_token() -> None:
    """At most 24 bytes at page size 1 with edges of 32 tokens (25 here: object sizes differ between
    Python versions)."""
    rng, num_leaves = np.random.default_rng(0), 256
    tokens = rng.integers(0, 100_000, (num_leaves, 64), dtype=np.int32)
    tokens[1::2, :32] = tokens[::2, :32]
    tokens[:, 0], tokens[:, 32] = np.arange(num_leaves) // 2, np.arange(num_leaves)
    cache_pages = num_leaves // 2 * 32 * 3
    tracemalloc.start()
    cache = KVCache(num_pages=cache_pages, page_size=1)
    for row in tokens:
        insert(cache, row)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert cache.evictable_tokens == cache_pages
    assert used / cache_pages < 25
