"""The digests of the blocks in a radix tree (``core.prefix_digest``). Each is computed once, when
its stretch is attached: to compute them again from the root for each evicted stretch would take
time that grows with the square of a conversation's length."""

from __future__ import annotations

from setpoint.core.prefix_digest import DIGEST_BYTES, chained, first_digest
from setpoint.scheduler.cache.node import TOKEN_BYTES, TreeNode


class StretchDigests:
    """Stretch -> the digests of the blocks that end in it, one after the other. Must hear of every
    change of a tree from its beginning."""

    def __init__(self, block: int) -> None:
        """block: tokens of a block. A block may begin in one stretch and end in a later one."""
        self._block, self._stride = block, block * TOKEN_BYTES
        self._digests: dict[TreeNode, bytes] = {}

    def __len__(self) -> int:
        return len(self._digests)

    def add(self, node: TreeNode) -> bytes:
        """The digests of a stretch that was attached."""
        missing = node.start * TOKEN_BYTES % self._stride
        parts, above = [node.key], node.parent
        while missing > 0:
            assert above is not None
            parts.append(above.key[-missing:])
            missing -= len(parts[-1])
            above = above.parent
        before = self.last_above(node) or first_digest(_namespace_of(node))
        digests = chained(before, b"".join(reversed(parts)), self._block)
        self._digests[node] = digests
        return digests

    def pop(self, node: TreeNode) -> bytes:
        """The digests of a stretch that was evicted."""
        return self._digests.pop(node)

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """A stretch was cut in two; ``lower`` was the whole before."""
        begin = upper.start * TOKEN_BYTES
        num_blocks = (begin + len(upper.key)) // self._stride - begin // self._stride
        digests, cut = self._digests[lower], num_blocks * DIGEST_BYTES
        self._digests[upper], self._digests[lower] = digests[:cut], digests[cut:]

    def clear(self) -> None:
        self._digests.clear()

    def last_above(self, node: TreeNode) -> bytes:
        """The digest of the last block that ends before a stretch; empty if none does."""
        above = node.parent
        while above is not None:
            if digests := self._digests.get(above):
                return digests[-DIGEST_BYTES:]
            above = above.parent
        return b""


def _namespace_of(node: TreeNode) -> str:
    while node.parent is not None and node.parent.parent is not None:
        node = node.parent
    assert isinstance(node.label, tuple), "the label below the root has the namespace"
    return node.label[0]
