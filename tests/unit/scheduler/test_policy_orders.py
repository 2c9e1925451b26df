"""Queue orders (docs/sglang/scheduling.md#queue-orders) on views made by hand: each policy is a
pure function, its order is asserted."""

from __future__ import annotations

import numpy as np
import pytest

from setpoint.scheduler.policy import (
    POLICIES,
    Candidate,
    QueueView,
    dfs_weight,
    fcfs,
    hrrn,
    lof,
    lpm,
    random,
    routing_key,
    shortest_prefill_first,
)


def cached(seq_id: int, num_ids: int, num_matched: int, *, arrived_at: int = 0) -> Candidate:
    """A prompt that begins like no other."""
    return Candidate(
        seq_id,
        np.arange(num_ids, dtype=np.int32) + 1000 * seq_id,
        num_matched=num_matched,
        arrived_at=arrived_at,
    )


def same(seq_id: int, num_ids: int) -> Candidate:
    """A prompt that begins like every other of these, with nothing in the cache."""
    return Candidate(seq_id, np.arange(num_ids, dtype=np.int32))


def test_fcfs_is_queue_order_among_equally_urgent_ones() -> None:
    urgencies = [0, 5, -3, 5, 0]
    assert fcfs(
        QueueView([Candidate(number, urgency=urgency) for number, urgency in enumerate(urgencies)])
    ) == [
        1,
        3,
        0,
        4,
        2,
    ]
    assert fcfs(QueueView([Candidate(number) for number in (4, 2, 9)])) == [4, 2, 9]


def test_lof_takes_the_longest_output_of_the_most_urgent() -> None:
    queue = [
        Candidate(0, urgency=0, max_new_tokens=9),
        Candidate(1, urgency=0, max_new_tokens=30),
        Candidate(2, urgency=0, max_new_tokens=30),
    ]
    assert lof(QueueView(queue)) == [1, 2, 0]
    assert lof(QueueView([*queue, Candidate(3, urgency=1, max_new_tokens=1)])) == [3, 1, 2, 0]


def test_random_is_a_permutation_that_depends_on_the_seed_alone() -> None:
    queue = [Candidate(number) for number in range(20)]
    orders = [random(QueueView(queue, seed=(7, number))) for number in range(5)]
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert len({tuple(order) for order in orders}) == 5
    assert orders[3] == random(QueueView(queue, seed=(7, 3)))


def test_routing_key_follows_the_running_requests() -> None:
    keys = ["", "b", "a", "c", "a", "", "b"]
    queue = [Candidate(number, routing_key=key) for number, key in enumerate(keys)]
    assert routing_key(QueueView(queue, running_keys={"a": 2, "b": 5})) == [1, 6, 2, 4, 0, 5, 3]
    assert routing_key(QueueView(queue, running_keys={"a": 2, "b": 2})) == [1, 6, 2, 4, 0, 5, 3]
    assert routing_key(QueueView(queue)) == list(range(7)), "no running request has a key"


def test_shortest_prefill_first_counts_what_is_not_cached() -> None:
    queue = [
        cached(0, 50, 10),
        cached(1, 90, 60),
        cached(2, 20, 0),
        cached(3, 9, 9),
        cached(4, 40, 39),
    ]
    assert shortest_prefill_first(QueueView(queue)) == [3, 4, 2, 1, 0]


def test_hrrn_weighs_waiting_against_length() -> None:
    queue = [
        cached(0, 100, 0, arrived_at=0),
        cached(1, 10, 0, arrived_at=950),
        cached(2, 10, 5, arrived_at=960),
        cached(3, 8, 8, arrived_at=999),
    ]
    # ratios at 1000 computed tokens: 1000/100, 50/10, 40/5; the last is cached whole
    assert hrrn(QueueView(queue, num_processed=1000)) == [3, 0, 2, 1]
    assert hrrn(QueueView(queue[:3], num_processed=970)) == [
        0,
        1,
        2,
    ], "2 and 2 are equal: the earlier first"


def test_hrrn_ages_a_long_prompt_past_any_stream_of_short_ones() -> None:
    long, overtaken = cached(0, 1000, 0), 0
    for number in range(1, 500):
        processed = number * 10
        if (
            hrrn(
                QueueView(
                    [long, cached(number, 10, 0, arrived_at=processed - 20)],
                    num_processed=processed,
                )
            )[0]
            == 0
        ):
            break
        overtaken += 1
    assert (
        0 < overtaken <= 200
        # a wait of 2 per token is what the short ones ever have; the long one has it after 2000 tokens
    )


@pytest.mark.parametrize("order", [lpm, hrrn, shortest_prefill_first])
def test_of_requests_that_begin_alike_one_goes_first(order: object) -> None:
    view = QueueView(
        [same(0, 40), same(1, 20), cached(2, 60, 0), same(3, 40)],
        in_batch_check=4,
        in_batch_deprioritize=4,
    )
    ranked = order(view)  # type: ignore[operator]
    assert ranked.index(2) < min(ranked.index(1), ranked.index(3))
    assert ranked.index(0) < min(ranked.index(1), ranked.index(3))


def at(seq_id: int, *path: int, matched: int = 0) -> Candidate:
    return Candidate(seq_id, path=path, num_matched=matched or 10 * len(path))


def test_dfs_weight_finishes_the_heaviest_subtree_before_the_next() -> None:
    #        /- 1 - 2      requests 1, 4 end at 2, request 6 at 1
    #   root -- 5 - 6      requests 2, 3, 5 end at 6
    #        \- 9          request 0
    queue = [
        at(0, 9),
        at(1, 1, 2),
        at(2, 5, 6),
        at(3, 5, 6),
        at(4, 1, 2),
        at(5, 5, 6),
        at(6, 1),
        at(7),
    ]
    # nodes 1 and 5 weigh three each: the one that was waited for first goes first
    assert dfs_weight(QueueView(queue)) == [1, 4, 6, 2, 3, 5, 0, 7]
    assert dfs_weight(QueueView([*queue, at(8, 5)])) == [2, 3, 5, 8, 1, 4, 6, 0, 7]


def test_dfs_weight_takes_the_longer_match_within_a_stretch_first() -> None:
    assert dfs_weight(
        QueueView([at(0, 1, matched=3), at(1, 1, matched=8), at(2, 1, 2), at(3, 1, matched=8)])
    ) == [2, 1, 3, 0]


def walk(node: int, parents: dict[int, int], queue: list[Candidate]) -> list[int]:
    """The definition: depth first, heaviest child first, a node's own requests last. -1 is the
    root."""
    below = {
        child: [c for c in queue if child in c.path]
        for child, parent in parents.items()
        if parent == node
    }
    children = sorted(
        (child for child in below if below[child]),
        key=lambda child: (-len(below[child]), below[child][0].seq_id),
    )
    own = [c.seq_id for c in queue if (c.path[-1] if c.path else -1) == node]
    return [seq_id for child in children for seq_id in walk(child, parents, queue)] + own


def test_dfs_weight_agrees_with_a_walk_through_the_tree() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        paths: dict[int, tuple[int, ...]] = {-1: ()}
        parents = {node: int(rng.integers(-1, node)) for node in range(12)}
        for node, parent in parents.items():
            paths[node] = (*paths[parent], node)
        queue = [at(number, *paths[int(rng.integers(-1, 12))]) for number in range(15)]
        assert dfs_weight(QueueView(queue)) == walk(-1, parents, queue)


def test_every_policy_orders_every_request_once() -> None:
    queue = [cached(number, 5 + number, number % 5) for number in range(30)]
    for policy in POLICIES.values():
        assert sorted(policy.order(QueueView(queue))) == list(range(30))
        assert policy.order(QueueView([])) == []
