"""The radix tree and its handles: one test per clause of their contracts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from setpoint.core.request import Ids
from setpoint.scheduler.cache.node import TreeNode
from setpoint.scheduler.cache.radix import RadixTree
from setpoint.scheduler.cache.soundness import tree_problems


def ids(*tokens: int) -> Ids:
    return np.array(tokens, np.int32)


def add(tree: RadixTree, tokens: Ids, first_page: int, namespace: str = "") -> None:
    """Insert and let go; the pages that the tree had not are first_page, first_page + 1, …"""
    with tree.match(tokens, namespace) as handle:
        rest = tokens[handle.num_tokens :]
        tree.extend(
            handle,
            rest,
            np.arange(first_page, first_page + len(rest) // tree.page_size, dtype=np.int32),
        )


def test_match_finds_the_longest_prefix_and_its_pages_in_order() -> None:
    tree = RadixTree(1)
    add(tree, ids(5, 6, 7, 8), 1)
    add(tree, ids(5, 6, 9), 11)
    with tree.match(ids(5, 6, 9, 9), "") as handle:
        assert handle.num_tokens == 3
        assert handle.pages().tolist() == [1, 2, 11]
        assert not handle.pages().flags.writeable


def test_trace_names_the_stretches_of_a_match() -> None:
    tree = RadixTree(1)
    add(tree, ids(5, 6, 7, 8), 1)
    add(tree, ids(5, 6, 9), 11)
    traces = [
        tree.trace(ids(*tokens), "")
        for tokens in ((5, 6, 7, 8, 1), (5, 6, 9), (5, 6, 7), (5,), (4,))
    ]
    assert [num_tokens for num_tokens, _ in traces] == [4, 3, 3, 1, 0]
    (stem, left), (_, right) = traces[0][1], traces[1][1]
    assert [path for _, path in traces] == [(stem, left), (stem, right), (stem, left), (stem,), ()]
    assert len({stem, left, right}) == 3
    assert tree.trace(ids(5, 6, 9), "other") == (0, ())


def test_what_handles_alone_lock() -> None:
    tree = RadixTree(1)
    add(tree, ids(5, 6, 7, 8), 1)
    add(tree, ids(5, 6, 9), 11)
    with (
        tree.match(ids(5, 6, 7, 8), "") as one,
        tree.match(ids(5, 6, 9), "") as other,
        tree.match(ids(5, 6, 9), "") as twin,
    ):
        counts = [
            tree.num_unlocked_by(handles)
            for handles in ((), (one,), (other,), (other, twin), (one, other, twin))
        ]
        assert counts == [0, 2, 0, 1, 5]
        assert tree.locked_tokens == 5


def test_match_of_nothing_is_an_empty_handle() -> None:
    tree = RadixTree(2)
    add(tree, ids(1, 2), 1)
    for tokens in (ids(), ids(1), ids(2, 2)):
        with tree.match(tokens, "") as handle:
            assert (handle.num_tokens, handle.pages().tolist(), tree.locked_tokens) == (0, [], 0)


@pytest.mark.parametrize(("num_tokens", "expected"), [(3, 0), (4, 4), (5, 4), (8, 8), (9, 8)])
def test_match_is_floored_to_pages(num_tokens: int, expected: int) -> None:
    tree = RadixTree(4)
    tokens = np.arange(12, dtype=np.int32)
    add(tree, tokens, 1)
    assert tree.match_len(tokens[:num_tokens], "") == expected
    with tree.match(tokens[:num_tokens], "") as handle:
        assert (handle.num_tokens, len(handle.pages())) == (expected, expected // 4)


def test_difference_inside_a_page_ends_the_match_at_the_page_before() -> None:
    tree = RadixTree(4)
    add(tree, ids(*range(8)), 1)
    assert tree.match_len(ids(0, 1, 2, 3, 4, 5, 0, 7), "") == 4


def test_match_inside_an_edge_splits_it_and_locks_only_the_upper_part() -> None:
    tree = RadixTree(1)
    add(tree, ids(1, 2, 3, 4, 5), 1)
    with tree.match(ids(1, 2, 9), "") as handle:
        assert handle.pages().tolist() == [1, 2]
        assert (tree.locked_tokens, tree.evictable_tokens) == (2, 3)
        assert tree.evict(5).tolist() == [3, 4, 5]
    assert (tree.locked_tokens, tree.evictable_tokens) == (0, 2)
    assert tree_problems(tree) == []


def test_a_handle_stays_right_when_its_edge_is_split() -> None:
    tree = RadixTree(1)
    add(tree, ids(1, 2, 3, 4), 1)
    whole = tree.match(ids(1, 2, 3, 4), "")
    part = tree.match(ids(1, 2), "")
    assert whole.pages().tolist() == [1, 2, 3, 4]
    part.release()
    assert tree.locked_tokens == 4
    whole.release()
    assert (tree.locked_tokens, tree.evictable_tokens) == (0, 4)
    assert tree_problems(tree) == []


def test_match_len_changes_nothing() -> None:
    tree = RadixTree(1)
    add(tree, ids(1, 2, 3), 1)
    add(tree, ids(7, 8, 9), 4)
    assert tree.match_len(ids(1, 2), "") == 2
    assert tree.locked_tokens == 0
    assert len(tree.root.children) == 2
    assert all(not node.children for node in tree.root.children.values()), "split"
    assert tree.evict(1).tolist() == [1, 2, 3], "recency"


def test_release_is_idempotent() -> None:
    tree = RadixTree(1)
    add(tree, ids(1, 2), 1)
    keeper, handle = tree.match(ids(1, 2), ""), tree.match(ids(1, 2), "")
    handle.release()
    handle.release()
    assert tree.locked_tokens == 2
    assert handle.num_tokens == 2, "kept after release"
    keeper.release()
    assert tree.locked_tokens == 0


def test_leaving_the_context_releases_even_on_an_error() -> None:
    tree = RadixTree(1)
    add(tree, ids(1, 2), 1)
    with pytest.raises(KeyError, match="2"), tree.match(ids(1, 2), ""):
        raise KeyError(tree.locked_tokens)
    assert tree.locked_tokens == 0


def test_a_released_handle_is_not_used() -> None:
    tree = RadixTree(1)
    handle = tree.match(ids(1), "")
    handle.release()
    with pytest.raises(AssertionError, match="released"):
        handle.pages()
    with pytest.raises(AssertionError, match="released"):
        tree.extend(handle, ids(1), ids(1))


def test_extend_adopts_moves_the_lock_down_and_counts_what_was_known() -> None:
    tree = RadixTree(2)
    first, second = tree.match(ids(), ""), tree.match(ids(), "")
    assert tree.extend(first, ids(1, 2, 3, 4), ids(1, 2))[0].tolist() == []
    assert (first.num_tokens, first.pages().tolist(), tree.locked_tokens) == (4, [1, 2], 4)
    assert tree.extend(second, ids(1, 2, 3, 4, 5, 6), ids(3, 4, 5))[0].tolist() == [3, 4]
    assert second.pages().tolist() == [1, 2, 5]
    assert tree.extend(first, ids(5, 6), ids(6))[0].tolist() == [6], (
        "only the stretch beyond the handle"
    )
    assert first.pages().tolist() == [1, 2, 5]
    first.release()
    assert tree.locked_tokens == 6
    second.release()
    assert tree.evictable_tokens == 6
    assert tree_problems(tree) == []


def test_extend_that_ends_inside_an_edge_locks_up_to_there() -> None:
    tree = RadixTree(1)
    add(tree, ids(1, 2, 3, 4), 1)
    handle = tree.match(ids(), "")
    assert tree.extend(handle, ids(1, 2), ids(8, 9))[0].tolist() == [8, 9]
    assert (tree.locked_tokens, tree.evictable_tokens) == (2, 2)
    assert handle.pages().tolist() == [1, 2]


def test_extend_takes_only_whole_pages() -> None:
    tree = RadixTree(2)
    with tree.match(ids(), "") as handle, pytest.raises(AssertionError, match="whole pages"):
        tree.extend(handle, ids(1), ids(1))


def test_namespaces_never_share_and_leave_nothing_behind() -> None:
    tree = RadixTree(1)
    for page, namespace in enumerate(("", "a", "b"), 1):
        assert tree.match_len(ids(1), namespace) == 0
        add(tree, ids(1), page, namespace)
    with tree.match(ids(1), "a") as handle:
        assert handle.pages().tolist() == [2]
    assert len(tree.evict(3)) == 3
    assert not tree.root.children


def test_a_namespace_cannot_pose_as_tokens() -> None:
    tree = RadixTree(2)
    add(tree, ids(1, 2, 3, 4), 1, "a")
    assert tree.match_len(ids(3, 4), "a" + ids(1, 2).tobytes().decode()) == 0


def test_eviction_takes_whole_unlocked_leaves_least_recently_used_first() -> None:
    tree = RadixTree(1)
    add(tree, ids(1, 2, 3), 1)
    add(tree, ids(4, 5, 6), 4)
    add(tree, ids(7, 8, 9), 7)
    tree.match(ids(1, 2, 3), "").release()
    assert tree.evict(1).tolist() == [4, 5, 6]
    assert tree.evict(0).tolist() == []
    assert tree.evict(4).tolist() == [7, 8, 9, 1, 2, 3]
    assert tree.evict(1).tolist() == [], "none is left"


def test_a_parent_joins_when_its_last_child_is_gone() -> None:
    tree = RadixTree(1)
    add(tree, ids(1, 2), 1)
    add(tree, ids(1, 3), 11)
    add(tree, ids(9), 20)
    assert tree.evict(1).tolist() == [2]
    assert tree.evict(1).tolist() == [11]
    assert tree.evict(1).tolist() == [1], "older than 9"
    assert tree.evict(1).tolist() == [20]


def test_a_parent_with_a_locked_child_stays() -> None:
    tree = RadixTree(1)
    add(tree, ids(1, 2), 1)
    add(tree, ids(1, 3), 11)
    with tree.match(ids(1, 3), ""):
        assert tree.evict(9).tolist() == [2]
        assert (tree.evictable_tokens, tree.locked_tokens) == (0, 2)


def test_touch_refreshes_and_does_nothing_else() -> None:
    tree = RadixTree(1)
    add(tree, ids(1, 2, 3), 1)
    add(tree, ids(4, 5, 6), 4)
    tree.touch(ids(1, 2), "")
    tree.touch(ids(8), "")
    assert tree.locked_tokens == 0
    assert all(not node.children for node in tree.root.children.values()), "split"
    assert tree.evict(1).tolist() == [4, 5, 6]


def test_a_deep_tree_needs_no_recursion() -> None:
    tree, depth = RadixTree(1), 5000
    with tree.match(ids(), "") as handle:
        for number in range(depth):
            tree.extend(handle, ids(number), ids(number + 1))
        assert len(handle.pages()) == depth
    tokens = np.arange(depth, dtype=np.int32)
    assert tree.match_len(tokens, "") == depth
    assert tree_problems(tree) == []
    assert tree.evict(depth - 1).tolist() == list(range(depth, 1, -1))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda node: setattr(node, "lock_ref", -1), "negative lock count"),
        (lambda node: setattr(node.parent, "lock_ref", 0), "fewer locks than its children"),
        (lambda node: setattr(node, "rank", 10**6), "later than its parent"),
        (lambda node: setattr(node, "key", node.key[:-1]), "not whole pages"),
        (lambda node: setattr(node, "pages", node.pages[:4]), "does not have as many pages"),
        (lambda node: setattr(node, "label", b"12345678"), "not its parent's child"),
        (lambda node: setattr(node, "key", node.key[::-1]), "not its first page"),
    ],
)
def test_check_names_the_damage(damage: Callable[[TreeNode], None], sentence: str) -> None:
    tree = RadixTree(2)
    add(tree, ids(1, 2), 1)
    handle = tree.match(ids(1, 2), "")
    tree.extend(handle, ids(3, 4, 5, 6), ids(8, 9))
    assert tree_problems(tree) == []
    damage(handle.node)
    assert any(sentence in problem for problem in tree_problems(tree)), tree_problems(tree)


def test_check_counts_tokens_again() -> None:
    tree = RadixTree(1)
    add(tree, ids(1, 2), 1)
    tree.evictable_tokens -= 1
    assert "counts 1 evictable" in tree_problems(tree)[0]


def test_page_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="page_size"):
        RadixTree(0)
