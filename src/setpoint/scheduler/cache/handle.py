"""A locked prefix, as its holder sees it."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

import numpy as np

from setpoint.core.request import Ids
from setpoint.scheduler.cache.node import TreeNode

NO_PAGES = np.zeros(0, np.int32)


class Paths(Protocol):
    """The part of the tree that a handle uses."""

    def pages_above(self, node: TreeNode) -> Ids: ...

    def unneed(self, handle: PrefixHandle, pages: Ids, first_row: int) -> Ids: ...

    def unlock(self, node: TreeNode) -> None: ...


class PrefixHandle:
    """A locked path from the root: its pages are neither evicted nor reused until ``release``,
    which is idempotent.

    A context manager whose exit releases. Made by ``match`` and moved down by ``extend``, never by
    hand.
    """

    __slots__ = ("_node", "_tree", "namespace", "needed", "num_tokens")

    def __init__(self, tree: Paths, node: TreeNode, namespace: str, num_tokens: int) -> None:
        self._tree = tree
        self._node: TreeNode | None = node
        self.namespace = namespace
        self.num_tokens = num_tokens
        """Length of the path in tokens, a multiple of the page size; written by match and extend,
        kept after release."""
        self.needed = NO_PAGES
        """Pages of window groups that are marked as needed on behalf of this handle. Written by
        match; a caller that takes them over empties the list."""

    @property
    def node(self) -> TreeNode:
        """The node where the path ends. Asserts that the handle is not released."""
        assert self._node is not None, "the handle is released"
        return self._node

    def move(self, node: TreeNode, num_tokens: int) -> None:
        """Record that the tree has moved the lock to ``node``."""
        self._node, self.num_tokens = node, num_tokens

    def pages(self) -> Ids:
        """The page rows of the path in order, num_tokens // page_size of them, flat and read-only.
        In the columns of window groups they hold only the pages that a sequence continuing the path
        reaches back to. Must not be called after release."""
        return self._tree.pages_above(self.node)

    def release(self) -> None:
        if self._node is None:
            return
        if len(self.needed):
            self._tree.unneed(self, self.needed, 0)
            self.needed = NO_PAGES
        node, self._node = self._node, None
        self._tree.unlock(node)

    def __enter__(self) -> PrefixHandle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
