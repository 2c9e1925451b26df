"""Checks the invariants of a radix tree, and reports each violation as a sentence."""

from __future__ import annotations

from setpoint.scheduler.cache.node import TreeNode
from setpoint.scheduler.cache.radix import RadixTree


def tree_problems(tree: RadixTree) -> list[str]:
    """Every violated invariant, as a sentence; empty = sound. O(tree)."""
    problems: list[str] = []
    evictable = locked = 0
    for node in tree.nodes():
        problems += [f"A node of {node.num_tokens} tokens {what}." for what in _faults(tree, node)]
        evictable += 0 if node.lock_ref else node.num_tokens
        locked += node.num_tokens if node.lock_ref else 0
    if tree.root.lock_ref:
        problems.append("The root is locked.")
    if (evictable, locked) != (tree.evictable_tokens, tree.locked_tokens):
        counted = f"{tree.evictable_tokens} evictable and {tree.locked_tokens} locked tokens"
        problems.append(f"The tree counts {counted} but holds {evictable} and {locked}.")
    if tree.windows is not None:
        problems += tree.windows.check(tree.nodes())
    return problems


def _faults(tree: RadixTree, node: TreeNode) -> list[str]:
    parent, children = node.parent, node.children.values()
    if parent is None or parent.children.get(node.label) is not node:
        return ["is not its parent's child"]
    page_label = node.label[1] if isinstance(node.label, tuple) else node.label
    faults = {
        "has a namespace in its label below the first level, or none there": (
            isinstance(node.label, tuple) != (parent is tree.root)
        ),
        "is not whole pages": not node.key or len(node.key) % tree.stride != 0,
        "does not have as many pages as its tokens fill": (
            len(node.pages) != len(node.key) // tree.stride * tree.row_bytes
        ),
        "has a label that is not its first page": (
            page_label != tree.page_label(node.key[: tree.stride])
        ),
        "has a negative lock count": node.lock_ref < 0,
        "has fewer locks than its children together": (
            node.lock_ref < sum(child.lock_ref for child in children)
        ),
        "was used later than its parent": (
            tree.policy.last_use(node.rank) > tree.policy.last_use(parent.rank)
        ),
        "can be evicted but is not queued": node.is_evictable and node.queued is None,
        "is queued later than its key says": (
            node.is_evictable and node.queued is not None and node.queued > tree.policy.key(node)
        ),
    }
    return [fault for fault, holds in faults.items() if holds]
