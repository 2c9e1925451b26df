"""The protocol of objects that get every change of the radix tree, and one of them, which collects
the names of prefixes for the frontend's choice of an engine."""

from __future__ import annotations

from typing import Protocol

from setpoint.core.messages import Blocks, Cached
from setpoint.core.prefix_digest import BLOCK_TOKENS, names_of
from setpoint.scheduler.cache.node import TreeNode
from setpoint.scheduler.cache.stretch_digests import StretchDigests


class TreeListener(Protocol):
    """Gets every change of a tree after it has happened, and collects it."""

    def gained(self, node: TreeNode) -> None:
        """The stretch was attached."""
        ...

    def lost(self, node: TreeNode) -> None:
        """The stretch, a leaf, was evicted; it still knows its parent."""
        ...

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """A stretch was cut in two; ``lower`` was the whole before."""
        ...

    def cleared(self) -> None:
        """The tree was replaced by an empty one."""
        ...

    def take(self) -> Cached | Blocks | None:
        """The changes since the last call; None if there are none."""
        ...


class CacheNews:
    """Collects the changes of one tree. A stretch of the tree stands for the prefixes that end in
    it."""

    def __init__(self, block: int = BLOCK_TOKENS) -> None:
        self._digests = StretchDigests(block)
        self._changes: dict[bytes, bool] = {}
        """Name -> whether it is cached now, for those that have changed."""
        self._is_cleared = False

    def gained(self, node: TreeNode) -> None:
        self._note(self._digests.add(node), is_cached=True)

    def lost(self, node: TreeNode) -> None:
        self._note(self._digests.pop(node), is_cached=False)

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        self._digests.split(upper, lower)

    def cleared(self) -> None:
        self._digests.clear()
        self._changes.clear()
        self._is_cleared = True

    def take(self) -> Cached | None:
        if not self._changes and not self._is_cleared:
            return None
        stored = b"".join(name for name, is_cached in self._changes.items() if is_cached)
        removed = b"".join(name for name, is_cached in self._changes.items() if not is_cached)
        news = Cached(stored, removed, self._is_cleared)
        self._changes, self._is_cleared = {}, False
        return news

    def _note(self, digests: bytes, *, is_cached: bool) -> None:
        for name in names_of(digests):
            self._changes[name] = is_cached
