"""What of a window's pages stays cached, and which prefixes can be used then: traces of the scripted
executor, which compares what every row reads."""

from __future__ import annotations

import numpy as np

from setpoint.core.pagerows import PageRow, WindowColumns
from setpoint_testing.harness import Harness, ids_of

WINDOW = 4
ROW = PageRow(1, (WindowColumns(WINDOW, 1, 2),), read_step=1)
A = list(range(40))
B = A[:20] + list(range(60, 80))
C = A[:20] + list(range(80, 95))
INSIDE = len(A) - WINDOW + 1
"""Window pages of A in no window before its end."""


def harness_of(num_pages: int = 200, row: PageRow = ROW, **config: object) -> Harness:
    return Harness(num_pages=num_pages, row=row, **{"chunked_prefill_size": 8, **config})


def serve(harness: Harness, rid: str, prompt: list[int], max_new_tokens: int = 1) -> int:
    """-> tokens of the prompt that came from the cache."""
    harness.submit(rid, prompt, max_new_tokens=max_new_tokens)
    harness.drain()
    return harness.outcomes[rid].num_cached


def press(harness: Harness, num_pages: int) -> None:
    """Evict as many pages, or a few more."""
    cache = harness.cache
    pages = cache.alloc(cache.free_tokens + num_pages)
    assert pages is not None
    cache.free(pages)
    assert cache.check() == []


def usable(harness: Harness, prompt: list[int]) -> int:
    return harness.cache.peek(ids_of(prompt))


def test_everything_stays_cached_while_there_is_room() -> None:
    harness = harness_of()
    serve(harness, "a", A)
    assert [usable(harness, A[:end]) for end in (40, 21, 20, 3)] == [40, 21, 20, 3]
    assert harness.cache.pool_stats().evictable == 2 * 40


def test_the_inside_of_a_stretch_goes_first_and_its_end_stays() -> None:
    harness = harness_of()
    serve(harness, "a", A)
    press(harness, INSIDE)
    assert usable(harness, A[:36]) == 0
    assert usable(harness, A) == 40
    assert harness.cache.pool_stats().evictable < 2 * 40
    assert serve(harness, "again", [*A, 90]) == 40


def test_a_fork_is_computed_once_more_and_then_stays() -> None:
    harness = harness_of()
    serve(harness, "a", A)
    press(harness, INSIDE)
    assert serve(harness, "b", B) == 0, "nothing before the fork has a window"
    press(harness, INSIDE)
    assert serve(harness, "c", C) == 20
    assert harness.cache.pool_stats().held == 0


def test_what_was_computed_again_takes_the_place_of_the_trees_pages() -> None:
    """Otherwise a sequence alone would hold its prefix twice, and need not fit any more."""
    harness = harness_of()
    serve(harness, "a", A)
    press(harness, INSIDE)
    harness.submit("b", B, max_new_tokens=8)
    harness.turn(6)
    state = harness.scheduler.state
    used = harness.cache.pool_stats().used
    assert used <= state.costs.most(state.holdings.num_covered(harness.sequence("b")))
    harness.drain()


def test_a_leaf_takes_its_window_with_it() -> None:
    harness = harness_of()
    serve(harness, "a", A)
    stats = harness.cache.pool_stats()
    press(harness, stats.evictable)
    assert usable(harness, A) == 0
    assert harness.cache.pool_stats().evictable == 0


def test_a_sequence_runs_in_a_pool_far_smaller_than_itself() -> None:
    """Where every layer has a window; its answer reads what it should."""
    row = PageRow(0, (WindowColumns(WINDOW, 0, 1),), read_step=1)
    harness = harness_of(num_pages=24, row=row, max_req_len=400, max_req_input_len=300)
    serve(harness, "a", list(np.arange(90) % 97), max_new_tokens=200)
    outcome = harness.outcomes["a"]
    assert outcome.finish is not None
    assert (outcome.finish.type, len(outcome.ids)) == ("length", 200)


def test_a_page_behind_the_window_may_be_anothers_in_the_next_plan() -> None:
    """With a step in flight, too: plans are executed in order."""
    harness = harness_of(num_pages=70, depth=1)
    for number in range(3):
        harness.submit(f"r{number}", range(number, number + 20), max_new_tokens=12)
    harness.drain()
    handed_out = [page for plan in harness.plans for page in plan.pages.pages[:, 1].tolist()]
    assert len(handed_out) > len(set(handed_out))
