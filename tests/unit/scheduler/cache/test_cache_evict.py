"""The eviction policies and their queue on their own: order, old entries, one valid entry per
node."""

from __future__ import annotations

import random

import pytest

from setpoint.scheduler.cache.evict import POLICIES, EvictionQueue, Lfu, Lru, Tlru, eviction_policy
from setpoint.scheduler.cache.node import TreeNode


def leaf(last_use: int, parent: TreeNode | None = None, *, num_tokens: int = 1) -> TreeNode:
    return TreeNode(parent, last_use, b"\0\0\0\0" * num_tokens, b"", last_use)


def scored(
    score: int, last_use: int, parent: TreeNode | None = None, *, num_tokens: int = 1
) -> TreeNode:
    node = leaf(last_use, parent, num_tokens=num_tokens)
    node.rank = score, last_use
    return node


def order(queue: EvictionQueue) -> list[TreeNode]:
    return list(iter(queue.pop, None))


def queue_of(policy: Lru, nodes: list[TreeNode]) -> EvictionQueue:
    queue = EvictionQueue(policy)
    for node in nodes:
        queue.push(node)
    return queue


def test_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'random'; known: lru, lfu, slru, priority, tlru"):
        eviction_policy("random")


def test_least_recently_used_first() -> None:
    nodes = [leaf(3), leaf(1), leaf(2)]
    assert order(queue_of(Lru(), nodes)) == [nodes[1], nodes[2], nodes[0]]


def test_a_touched_leaf_moves_back() -> None:
    old, new = leaf(1), leaf(2)
    queue = queue_of(Lru(), [old, new])
    old.rank = 3
    assert order(queue) == [new, old]


def test_a_locked_leaf_is_passed_over_and_returns_when_pushed_again() -> None:
    locked, other = leaf(1), leaf(2)
    queue = queue_of(Lru(), [locked, other])
    locked.lock_ref = 1
    assert queue.pop() is other
    locked.lock_ref = 0
    queue.push(locked)
    assert order(queue) == [locked]


def test_a_leaf_that_grew_a_child_is_passed_over() -> None:
    parent = leaf(1)
    queue = queue_of(Lru(), [parent])
    child = leaf(2, parent)
    parent.adopt(child)
    queue.push(child)
    assert queue.pop() is child
    parent.drop(child)
    queue.push(parent)
    assert queue.pop() is parent


def test_one_entry_per_node_however_often_it_is_pushed() -> None:
    node = leaf(1)
    assert order(queue_of(Lru(), 10 * [node])) == [node]


def test_a_key_that_fell_counts_once_the_node_is_pushed_again() -> None:
    first, second = scored(1, 1), scored(1, 2)
    queue = queue_of(Lfu(), [first, second])
    second.rank = (0, 2)
    queue.push(second)
    assert order(queue) == [second, first]


def test_void_entries_do_not_pile_up() -> None:
    falling, above = scored(1000, 1), [scored(2000, 2 + number) for number in range(10)]
    queue = queue_of(Lfu(), [falling, *above])
    for score in range(999, 0, -1):
        falling.rank = (score, 1)
        queue.push(falling)
    assert len(queue._heap) <= 2 * (len(above) + 1) + 1
    assert order(queue) == [falling, *above]


def test_the_queue_equals_a_sort_under_random_keys() -> None:
    """Keys rise in silence and fall with a push: what comes out is always the least of what can be
    evicted."""
    rng, tick = random.Random(0), 100
    nodes = [scored(0, number) for number in range(30)]
    queue = queue_of(Lfu(), nodes)
    for _ in range(3000):
        node = rng.choice(nodes)
        tick += 1
        change = rng.randrange(5)
        if change == 0:
            node.rank = (node.rank[0] + rng.randint(1, 3), node.rank[1])
        elif change == 1:
            node.rank = (node.rank[0], tick)
        elif change == 2:
            node.rank = (node.rank[0] - rng.randint(0, 3), node.rank[1])
            if node.is_evictable:
                queue.push(node)
        elif change == 3:
            node.lock_ref ^= 1
            if node.is_evictable:
                queue.push(node)
        else:
            evictable = [node for node in nodes if node.is_evictable]
            found = queue.pop()
            assert found is min(evictable, key=lambda node: node.rank, default=None)
            if found is not None:
                queue.push(found)


def test_least_often_hit_first_then_least_recently_used() -> None:
    nodes = [scored(2, 1), scored(1, 2), scored(1, 3)]
    assert order(queue_of(eviction_policy("lfu"), nodes)) == [nodes[1], nodes[2], nodes[0]]


def test_slru_spares_what_was_hit_often_enough() -> None:
    nodes = [scored(2, 1), scored(9, 2), scored(1, 3), scored(0, 4)]
    assert order(queue_of(eviction_policy("slru"), nodes)) == [
        nodes[2],
        nodes[3],
        nodes[0],
        nodes[1],
    ]
    assert order(queue_of(eviction_policy("slru", protected_threshold=3), nodes)) == [
        nodes[0],
        nodes[2],
        nodes[3],
        nodes[1],
    ]


def test_lowest_priority_first() -> None:
    nodes = [scored(5, 1), scored(-1, 2), scored(5, 3)]
    assert order(queue_of(eviction_policy("priority"), nodes)) == [nodes[1], nodes[0], nodes[2]]


@pytest.mark.parametrize("name", POLICIES)
def test_ranks_never_fall_with_use(name: str) -> None:
    policy = eviction_policy(
        name, **({"threshold": 4, "next_prompt_estimate": 1} if name == "tlru" else {})
    )
    rank = policy.fresh(0)
    for tick, (priority, end) in enumerate(((3, 10), (-7, 4), (9, 12))):
        for higher in (
            policy.use(rank, tick),
            policy.hit(rank, priority),
            policy.grow(rank, priority, end),
        ):
            assert higher >= rank
        rank = policy.grow(policy.use(rank, tick), priority, end)
        assert policy.last_use(rank) == tick
    assert name != "priority" or rank[0] == 9


class TestTlru:
    """Threshold 10, next prompt 4: of a conversation of 20 tokens the first 14 must stay."""

    def chain(self, *sizes: int, length: int) -> list[TreeNode]:
        """A path below an empty root, deepest first: the order in which it can be given up."""
        nodes = [TreeNode(None, b"", b"", b"", 0)]
        for number, size in enumerate(sizes):
            nodes.append(scored(length, 100 - number, nodes[-1], num_tokens=size))
        return nodes[:0:-1]

    def safe(self, nodes: list[TreeNode], **parameters: int) -> int:
        """Tokens of the stretches that the policy gives up first."""
        policy = Tlru(**{"threshold": 10, "next_prompt_estimate": 4, **parameters})
        return sum(node.num_tokens for node in nodes if policy.key(node)[0] == 0)

    def test_a_long_conversation_gives_up_its_tail_and_no_more(self) -> None:
        assert self.safe(self.chain(*[2] * 10, length=20)) == 6
        assert self.safe(self.chain(*[2] * 7, length=20)) == 0, "the tail is gone already"

    def test_a_stretch_across_the_border_stays(self) -> None:
        assert self.safe(self.chain(13, 4, 3, length=20)) == 3
        assert self.safe(self.chain(20, length=20)) == 0

    def test_a_conversation_within_the_threshold_gives_up_everything(self) -> None:
        assert self.safe(self.chain(2, 2, 2, length=6)) == 6

    def test_without_slack_it_is_lru(self) -> None:
        assert self.safe(self.chain(*[2] * 10, length=20), next_prompt_estimate=10) == 0
        assert self.safe(self.chain(*[2] * 10, length=20), threshold=0) == 0

    def test_tails_go_first_oldest_first_then_the_rest(self) -> None:
        long, short = (
            scored(size, tick, TreeNode(None, b"", b"", b"", 0), num_tokens=size)
            for size, tick in ((20, 1), (5, 2))
        )
        assert order(queue_of(Tlru(threshold=10, next_prompt_estimate=4), [long, short])) == [
            short,
            long,
        ]
