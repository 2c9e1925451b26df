"""Queue orders (docs/sglang/scheduling.md#queue-orders): the pure functions on views, and their
effect in the scheduler."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from setpoint.core.pagerows import CacheCosts
from setpoint.core.records import Fallback
from setpoint.scheduler.budget import PrefillBudget
from setpoint.scheduler.policy import QUEUE_LIMIT, Candidate, QueueView, lpm
from setpoint_testing.harness import VOCAB, Harness
from setpoint_testing.scripted import hashed_token, reference


def prompt(length: int, first: int = 10) -> list[int]:
    return [first, *((first * 7 + index) % VOCAB for index in range(length - 1))]


def expected(length: int, first: int, num_new: int) -> list[int]:
    return reference(np.array(prompt(length, first), np.int32), num_new, hashed_token(VOCAB))


def view(
    *candidates: tuple[int, list[int], int], check: int = 4, deprioritize: int = 4
) -> QueueView:
    return QueueView(
        [
            Candidate(seq_id, np.array(ids, np.int32), "", matched)
            for seq_id, ids, matched in candidates
        ],
        check,
        deprioritize,
    )


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


@pytest.mark.parametrize("policy", ["lpm", "hrrn"])
def test_policies_that_match_prefixes_fall_back_to_arrival_order_in_a_long_queue(
    policy: str,
) -> None:
    assert policy == "hrrn" or warmed(policy, QUEUE_LIMIT).outcomes["hit"].finish is not None
    crowded = warmed(policy, QUEUE_LIMIT + 1)
    assert crowded.outcomes["cold0"].finish is not None
    crowded.turn(9)
    assert crowded.recorder.of(Fallback) == [
        Fallback(f"{policy} acts as fcfs", "129 requests wait, more than 128")
    ]


@pytest.mark.parametrize("policy", ["dfs-weight", "shortest-prefill-first"])
def test_other_policies_have_no_limit(policy: str) -> None:
    assert warmed(policy, 3 * QUEUE_LIMIT).recorder.of(Fallback) == []


def test_fcfs_keeps_the_prefixes_of_waiting_requests_recent() -> None:
    harness = Harness(num_pages=200, max_running_requests=1)
    for name, first in (("old", 50), ("new", 60)):
        harness.submit(name, [first] * 20, max_new_tokens=1)
        harness.drain()
    harness.submit("long", [1] * 5, max_new_tokens=1)
    harness.submit("waits", [50] * 20 + [2], max_new_tokens=1)
    harness.scheduler._prefill._order._num_passes = 31
    harness.turn()
    pages = harness.cache.alloc(
        (harness.cache.free_tokens) + 1
    )  # evicts one leaf: the least recent
    assert pages is not None
    assert harness.cache.peek(np.full(20, 50, np.int32)) == 20
    assert harness.cache.peek(np.full(20, 60, np.int32)) < 20
    harness.cache.free(pages)


def admissions(harness: Harness) -> list[str]:
    """rids in the order of their admission; the engine is drained."""
    harness.drain()
    rids = list(harness.outcomes)
    return [rids[admit.seq_id] for plan in harness.plans for admit in plan.admits]


def test_lof_in_the_loop() -> None:
    harness = Harness(max_running_requests=1, policy="lof")
    for number, limit in enumerate([3, 9, 6]):
        harness.submit(f"r{number}", prompt(4, 10 + number), max_new_tokens=limit)
    assert admissions(harness) == ["r1", "r2", "r0"]


def test_random_in_the_loop_is_repeatable() -> None:
    def run(seed: int) -> list[str]:
        harness = Harness(max_running_requests=1, policy="random", seed=seed, num_pages=200)
        for number in range(8):
            harness.submit(f"r{number}", prompt(4, 10 + number), max_new_tokens=2)
        return admissions(harness)

    assert run(1) == run(1) != run(2)
    harness = Harness(policy="random", num_pages=200, max_running_requests=1)
    for number in range(8):
        harness.submit(f"r{number}", prompt(4, 10 + number))
    harness.loop.step()
    order, settings = harness.scheduler._prefill._order, harness.scheduler.state.settings
    assert [seq.rid for seq in order.take(settings)] != [seq.rid for seq in order.take(settings)], (
        "another order in every pass"
    )
    harness.drain()


def test_routing_key_in_the_loop() -> None:
    harness = Harness(max_running_requests=3, policy="routing-key", num_pages=200)
    for rid, key, limit in (
        ("a1", "a", 30),
        ("a2", "a", 30),
        ("b1", "b", 3),
        ("none", "", 3),
        ("b2", "b", 3),
        ("a3", "a", 3),
    ):
        harness.submit(
            rid, prompt(4, 10 + len(harness.outcomes)), max_new_tokens=limit, routing_key=key
        )
    assert admissions(harness)[3:] == ["a3", "none", "b2"]


def test_dfs_weight_in_the_loop() -> None:
    harness = Harness(max_running_requests=1, policy="dfs-weight", num_pages=400)
    heavy, light = prompt(12, 20), prompt(12, 50)
    for number, cached in enumerate((heavy, light)):
        harness.submit(f"warm{number}", cached, max_new_tokens=1)
        harness.drain()
    harness.plans.clear()
    for rid, ids in (
        ("cold", prompt(5, 80)),
        ("l1", [*light, 1]),
        ("h1", [*heavy, 1]),
        ("h2", [*heavy[:6], 2]),
        ("h3", [*heavy, 3]),
    ):
        harness.submit(rid, ids, max_new_tokens=1)
    # With h1 and h3 gone the subtrees weigh one each: the earlier request goes first.
    assert admissions(harness) == ["h1", "h3", "l1", "h2", "cold"]


def stream_of_short_ones(policy: str, turns: int) -> Harness:
    """One slot, one long prompt, and always two short ones that have just come."""
    harness = Harness(max_running_requests=1, policy=policy, num_pages=800, in_batch_check=-1)
    numbers = itertools.count()
    harness.submit("running", prompt(4, 3), max_new_tokens=3)
    harness.submit("long", prompt(150, 4), max_new_tokens=1)
    for _ in range(turns):
        while len(harness.waiting()) + len(harness.wire.inbox) < 3:
            number = next(numbers)
            harness.submit(
                f"short{number}", [5 + number % 80, number // 80, 1, 2, 3], max_new_tokens=1
            )
        harness.turn()
    return harness


def test_hrrn_serves_a_long_prompt_however_many_short_ones_come() -> None:
    assert stream_of_short_ones("hrrn", 20).outcomes["long"].finish is None, (
        "they go first for a while"
    )
    assert stream_of_short_ones("hrrn", 400).outcomes["long"].finish is not None


def test_shortest_prefill_first_may_let_it_starve() -> None:
    assert stream_of_short_ones("shortest-prefill-first", 400).outcomes["long"].finish is None


def test_shortest_prefill_first_runs_short_prompts_beside_a_long_one() -> None:
    harness = Harness(num_pages=400, chunked_prefill_size=16, policy="shortest-prefill-first")
    harness.submit("long", prompt(60, 10), max_new_tokens=2)
    harness.turn()
    for rid, length in (("s1", 4), ("s2", 7), ("s3", 30)):
        harness.submit(rid, prompt(length, 10 + length), max_new_tokens=2)
    harness.turn()
    assert harness.rows() == [(0, 16, 5, False), (1, 0, 4, True), (2, 0, 7, True)]
    assert not harness.sequence("long").prefilled
    harness.turn()
    assert harness.rows() == [(0, 21, 16, False)], (
        "30 tokens would have to be cut, and one prompt at a time is in pieces"
    )
    harness.drain()
    assert harness.outcomes["long"].ids == expected(60, 10, 2)
    assert harness.outcomes["s3"].ids == expected(30, 40, 2)


def test_shortest_prefill_first_matches_each_waiting_prompt_once_per_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Harness(num_pages=900, chunked_prefill_size=16, policy="shortest-prefill-first")
    harness.submit("long", prompt(60, 10), max_new_tokens=2)
    harness.turn()
    for number in range(20):
        harness.submit(f"r{number}", prompt(30, 11 + number), max_new_tokens=2)
    looks: list[int] = []
    peek = harness.cache.peek
    monkeypatch.setattr(
        harness.cache, "peek", lambda ids, namespace="": (looks.append(1), peek(ids, namespace))[1]
    )
    harness.turn()
    assert harness.rows() == [(0, 16, 16, False)]
    assert len(looks) == 20 + 1, (
        "to order them, and the first once more to see what the chunk may leave to it"
    )


def test_one_prompt_at_a_time_is_in_pieces() -> None:
    """Where the next chunk must wait for the last one's result, others may use the turn, but
    whole."""
    harness = Harness(
        num_pages=400,
        chunked_prefill_size=16,
        policy="shortest-prefill-first",
        depth=2,
        replan_inflight=False,
    )
    harness.submit("long", prompt(60, 10), max_new_tokens=2)
    harness.turn()
    harness.submit("cut", prompt(30, 20), max_new_tokens=2)
    harness.submit("whole", prompt(7, 30), max_new_tokens=2)
    harness.turn()
    assert harness.rows() == [(2, 0, 7, True)]
    assert harness.waiting() == ["cut"]
    harness.drain()
    assert harness.outcomes["cut"].ids == expected(30, 20, 2)


@pytest.mark.parametrize(
    ("page_size", "chunk", "extend", "waiting", "kept"),
    [
        (1, 16, 60, [4, 7, 30], 11),
        (1, 16, 60, [8, 8], 8),  # one page always remains for the prompt in mid-prefill
        (1, 16, 60, [8, 7], 15),
        (4, 16, 60, [3, 6, 1], 12),  # whole pages
        (1, 16, 5, [3, 5, 1], 3),  # not for those who are no shorter
        (1, 16, 60, [], 0),
        (1, None, 60, [3], 0),
    ],
)
def test_what_a_chunk_leaves_to_shorter_prompts(
    page_size: int, chunk: int | None, extend: int, waiting: list[int], kept: int
) -> None:
    budget = PrefillBudget(
        costs=CacheCosts(page_size=page_size), clip_max_new_tokens=4096, input_left=100, chunk_left=chunk, requests_left=None, reserved=0.0
    )  # fmt: skip
    assert budget.kept_for_shorter(extend, waiting) == kept


def test_shortest_prefill_first_leaves_the_long_one_a_page() -> None:
    harness = Harness(
        num_pages=400,
        chunked_prefill_size=16,
        max_running_requests=64,
        policy="shortest-prefill-first",
        in_batch_check=-1,
    )
    harness.submit("long", prompt(60, 10), max_new_tokens=2)
    harness.turn()
    for number in range(30):
        harness.submit(f"s{number}", prompt(5, 20 + number), max_new_tokens=2)
    harness.turn()
    assert [row[2] for row in harness.rows()] == [1, 5, 5, 5]
    harness.drain()


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight", "hrrn"])
def test_without_a_prefix_cache_policies_that_read_it_are_fcfs(policy: str) -> None:
    harness = Harness(max_running_requests=1, policy=policy, cache_enabled=False)
    for number in range(4):
        harness.submit(f"r{number}", prompt(9 - number, 10 + number), max_new_tokens=2)
    assert admissions(harness) == ["r0", "r1", "r2", "r3"]


@pytest.mark.parametrize("policy", ["lof", "random", "routing-key"])
def test_every_policy_but_those_that_match_keeps_waiting_prefixes_recent(policy: str) -> None:
    harness = Harness(num_pages=200, max_running_requests=1, policy=policy)
    for name, first in (("old", 50), ("new", 60)):
        harness.submit(name, [first] * 20, max_new_tokens=1)
        harness.drain()
    harness.submit("waits", [50] * 20 + [2], max_new_tokens=1)
    harness.submit("runs", [1] * 5, max_new_tokens=9)
    harness.scheduler._prefill._order._num_passes = 31
    harness.turn()
    pages = harness.cache.alloc(harness.cache.free_tokens + 1)  # evicts one leaf: the least recent
    assert pages is not None
    assert harness.cache.peek(np.full(20, 50, np.int32)) == 20
    harness.cache.free(pages)
