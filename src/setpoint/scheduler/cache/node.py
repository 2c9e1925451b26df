"""One edge of the radix tree, as plain data. Does not know the tree it is in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

TOKEN_BYTES = 4
"""Token ids are little-endian int32 (core.request.pack_ids)."""

PageLabel = int | bytes
"""The tokens of a page as a dict key: the token itself at page size 1 (a smaller object), else
packed."""

Label = PageLabel | tuple[str, PageLabel]
"""The key under which a parent finds a child: the child's first page; below the root, together with
the namespace."""

Rank = Any
EvictionKey = Any
"""Both are ints or tuples of ints, of the same form for all nodes of a policy, so that they can be
compared (``evict``)."""

_NO_CHILDREN: Mapping[Label, TreeNode] = MappingProxyType({})


@dataclass(slots=True, eq=False, repr=False)
class TreeNode:
    """A stretch of whole pages after the parent's stretch, and the pages that hold its KV.

    Tokens and pages are ``bytes``, not arrays: 33 bytes of overhead instead of 112, no base kept
    alive by a slice, and comparing is a memcmp. All fields are written by RadixTree, except
    ``queued``.
    """

    parent: TreeNode | None
    """None: this is the root, an empty stretch that is never locked."""
    label: Label
    key: bytes
    """Packed token ids, a positive multiple of the page size (empty in the root)."""
    pages: bytes
    """Packed page rows (``core.pagerows``): per page of ``key`` one int32 number per group."""
    rank: Rank
    """What the eviction policy keeps about this stretch; both parts of a split inherit it. Its last
    use is never later than the parent's."""
    lock_ref: int = 0
    """Number of handles whose path ends here or below."""
    queued: EvictionKey | None = None
    """The key of this node's valid entry in the eviction queue; written by the queue."""
    children: Mapping[Label, TreeNode] = field(default_factory=lambda: _NO_CHILDREN)
    """Written by adopt and drop. Leaves, which are most nodes, share one empty mapping: a dict
    costs 80 bytes."""

    @property
    def num_tokens(self) -> int:
        return len(self.key) // TOKEN_BYTES

    @property
    def start(self) -> int:
        """Position where this stretch begins: the number of tokens above it. O(depth)."""
        above, num_tokens = self.parent, 0
        while above is not None:
            num_tokens += above.num_tokens
            above = above.parent
        return num_tokens

    @property
    def is_evictable(self) -> bool:
        """Whether this is an unlocked leaf, which eviction may take now. (An unlocked inner node
        has only unlocked nodes below it.)"""
        return not self.children and not self.lock_ref

    def adopt(self, child: TreeNode) -> None:
        """Make ``child`` this node's child under its label, in place of any other."""
        child.parent = self
        if isinstance(self.children, dict):
            self.children[child.label] = child
        else:
            self.children = {child.label: child}

    def drop(self, child: TreeNode) -> None:
        """Remove ``child`` from this node's children."""
        assert isinstance(self.children, dict)
        del self.children[child.label]
        if not self.children:
            self.children = _NO_CHILDREN
