"""Queue orders (FACTS §2.3): the pure functions on views, and their effect in the scheduler."""

from __future__ import annotations

import numpy as np

from setpoint.scheduler.policy import QUEUE_LIMIT, Candidate, QueueView, lpm
from setpoint.testing.harness import Harness


def view(*candidates: tuple[int, list[int], int], check: int = 4, deprioritize: int = 4) -> QueueView:
    return QueueView([Candidate(seq_id, np.array(ids, np.int32), "", matched) for seq_id, ids, matched in candidates], check, deprioritize)


def test_lpm_puts_the_longest_match_first_and_keeps_arrival_order_in_ties() -> None:
    assert lpm(view((0, [1], 5), (1, [2], 9), (2, [3], 5), (3, [4], 0))) == [1, 0, 2, 3]


def test_lpm_sends_one_of_several_requests_with_an_uncached_common_prefix_ahead() -> None:
    shared = [7] * 10
    assert lpm(view((0, [*shared, 1], 0), (1, [*shared, 2], 0), (2, [9, 9], 1))) == [2, 0, 1]


def test_lpm_deduplication_looks_only_at_requests_with_little_in_the_cache() -> None:
    shared = [7] * 10
    assert lpm(view((0, [*shared, 1], 5), (1, [*shared, 2], 6))) == [1, 0]
    assert lpm(view((0, [*shared, 1], 0), (1, [*shared, 2], 0), check=-1)) == [0, 1]


def warmed(policy: str, num_waiting: int) -> Harness:
    """One slot, a cached prefix that the last arrival shares."""
    harness = Harness(num_pages=4000, max_running_requests=1, policy=policy)
    harness.submit("warm", [5] * 40, max_new_tokens=1)
    harness.drain()
    for number in range(num_waiting - 1):
        harness.submit(f"cold{number}", [60 + number % 30, number % 90, 3], max_new_tokens=1)
    harness.submit("hit", [5] * 40 + [6], max_new_tokens=1)
    harness.turn()
    return harness


def test_lpm_serves_the_cached_prefix_first() -> None:
    assert warmed("lpm", 10).outcomes["hit"].finish is not None
    assert warmed("fcfs", 10).outcomes["hit"].finish is None


def test_lpm_falls_back_to_arrival_order_in_a_long_queue() -> None:
    assert warmed("lpm", QUEUE_LIMIT).outcomes["hit"].finish is not None
    assert warmed("lpm", QUEUE_LIMIT + 1).outcomes["hit"].finish is None


def test_fcfs_keeps_the_prefixes_of_waiting_requests_recent() -> None:
    harness = Harness(num_pages=200, max_running_requests=1)
    for name, first in (("old", 50), ("new", 60)):
        harness.submit(name, [first] * 20, max_new_tokens=1)
        harness.drain()
    harness.submit("long", [1] * 5, max_new_tokens=1)
    harness.submit("waits", [50] * 20 + [2], max_new_tokens=1)
    harness.scheduler._prefill._order._num_passes = 31
    harness.turn()
    pages = harness.cache.alloc((harness.cache.free_tokens) + 1)  # evicts one leaf: the least recent
    assert pages is not None
    assert harness.cache.peek(np.full(20, 50, np.int32)) == 20
    assert harness.cache.peek(np.full(20, 60, np.int32)) < 20
    harness.cache.free(pages)
