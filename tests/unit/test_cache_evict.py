"""The eviction queue on its own: order, old entries, one entry per node."""

from __future__ import annotations

import pytest

from setpoint.scheduler.cache.evict import EVICTION_KEYS, EvictionQueue
from setpoint.scheduler.cache.node import Node


def leaf(last_access: int, parent: Node | None = None) -> Node:
    return Node(parent, last_access, b"\0\0\0\0", b"", last_access)


def test_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'random'; known: lru"):
        EvictionQueue("random")


def test_least_recently_used_first() -> None:
    queue, nodes = EvictionQueue("lru"), [leaf(3), leaf(1), leaf(2)]
    for node in nodes:
        queue.push(node)
    assert [queue.pop() for _ in range(4)] == [nodes[1], nodes[2], nodes[0], None]


def test_a_touched_leaf_moves_back() -> None:
    queue, old, new = EvictionQueue("lru"), leaf(1), leaf(2)
    queue.push(old)
    queue.push(new)
    old.last_access = 3
    assert [queue.pop(), queue.pop(), queue.pop()] == [new, old, None]


def test_a_locked_leaf_is_passed_over_and_returns_when_pushed_again() -> None:
    queue, locked, other = EvictionQueue("lru"), leaf(1), leaf(2)
    queue.push(locked)
    queue.push(other)
    locked.lock_ref = 1
    assert queue.pop() is other
    locked.lock_ref = 0
    queue.push(locked)
    assert [queue.pop(), queue.pop()] == [locked, None]


def test_a_leaf_that_grew_a_child_is_passed_over() -> None:
    queue, parent = EvictionQueue("lru"), leaf(1)
    queue.push(parent)
    child = leaf(2, parent)
    parent.adopt(child)
    queue.push(child)
    assert queue.pop() is child
    parent.drop(child)
    queue.push(parent)
    assert queue.pop() is parent


def test_one_entry_per_node_however_often_it_is_pushed() -> None:
    queue, node = EvictionQueue("lru"), leaf(1)
    for _ in range(10):
        node.lock_ref = 1
        node.lock_ref = 0
        queue.push(node)
    assert [queue.pop(), queue.pop()] == [node, None]


def test_policies_are_rows_of_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EVICTION_KEYS, "mru", lambda node: (-node.last_access, node.last_access))
    queue, nodes = EvictionQueue("mru"), [leaf(1), leaf(2)]
    for node in nodes:
        queue.push(node)
    assert queue.pop() is nodes[1]
