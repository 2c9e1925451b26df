"""What the scheduler tells the cache of its requests: priorities at insertion, and hits, each
once."""

from __future__ import annotations

import numpy as np
import pytest

from setpoint.core.request import Ids
from setpoint.core.settings import PrioritySettings
from setpoint.scheduler.cache.node import TreeNode
from setpoint_testing.harness import Harness

A, B = range(10), range(20, 30)


def ids(tokens: range) -> Ids:
    return np.array(tokens, np.int32)


def root_children(harness: Harness) -> list[TreeNode]:
    return list(harness.cache._tree.root.children.values())


def survivors(harness: Harness, num_evicted: int) -> tuple[int, int]:
    """Cached tokens of the prompts A and B once ``num_evicted`` tokens at least had to go."""
    cache = harness.cache
    pages = cache.alloc(cache.free_tokens + num_evicted)
    assert pages is not None
    left = cache.peek(ids(A)), cache.peek(ids(B))
    cache.free(pages)
    return left


def test_low_priority_goes_first_and_output_before_its_prompt() -> None:
    harness = Harness(eviction_policy="priority", priority=PrioritySettings())
    for rid, prompt, priority in (("low", B, 1), ("high", A, 5)):
        harness.submit(rid, prompt, priority=priority, max_new_tokens=4)
        harness.drain()
    outputs = 3  # the last token is never computed
    assert survivors(harness, outputs) == (10, 10)
    assert survivors(harness, 1) == (10, 0)
    assert survivors(harness, outputs) == (10, 0)
    assert survivors(harness, 1) == (0, 0)


def test_a_prompt_is_worth_what_its_most_important_request_is() -> None:
    harness = Harness(eviction_policy="priority", priority=PrioritySettings())
    for rid, prompt, priority in (("first", A, 1), ("other", B, 3), ("again", A, 5)):
        harness.submit(rid, prompt, priority=priority, max_new_tokens=1)
        harness.drain()
    assert survivors(harness, 1) == (10, 0)


def test_priorities_count_as_the_scheduler_understands_them() -> None:
    for rule, left in ((PrioritySettings(low_first=True), (0, 10)), (None, (10, 0))):
        harness = Harness(eviction_policy="priority", priority=rule)
        for rid, prompt, priority in (("one", B, 1), ("two", A, 5)):
            harness.submit(rid, prompt, priority=priority, max_new_tokens=1)
            harness.drain()
        assert survivors(harness, 1) == left


def test_an_admission_counts_one_hit_however_often_it_was_refused() -> None:
    harness = Harness(num_pages=40, eviction_policy="lfu")
    harness.submit("first", A, max_new_tokens=1)
    harness.drain()
    harness.submit("big", range(50, 70), max_new_tokens=5)
    harness.submit("again", A, max_new_tokens=12)
    harness.turn(2)
    assert (harness.running(), harness.waiting()) == (["big"], ["again"])
    harness.drain()
    node = next(node for node in root_children(harness) if node.key[:4] == ids(A)[:1].tobytes())
    assert (harness.outcomes["again"].num_cached, node.rank[0]) == (9, 1)


@pytest.mark.parametrize("chunk", [None, 3])
def test_chunks_and_coming_back_after_retraction_are_no_hits(chunk: int | None) -> None:
    harness = Harness(eviction_policy="lfu", chunked_prefill_size=chunk, test_retract_interval=2)
    for rid, prompt in (("a", A), ("b", B)):
        harness.submit(rid, prompt, max_new_tokens=6)
    harness.drain()
    assert sum(outcome.num_retractions for outcome in harness.outcomes.values()) > 0
    assert [node.rank[0] for node in root_children(harness)] == [0, 0]
