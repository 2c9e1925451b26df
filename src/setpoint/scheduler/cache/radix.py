"""The radix tree of cached prefixes: finds, locks, grows and gives up stretches of whole pages.

Works on token ids and page numbers as packed int32 bytes. It does not know which pages are free or
who holds pages outside the tree (``manager``), nor in which order policies give up leaves
(``evict``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from types import TracebackType

import numpy as np

from setpoint.core.request import Ids, pack_ids, unpack_ids
from setpoint.scheduler.cache.evict import EvictionQueue, Lru
from setpoint.scheduler.cache.node import TOKEN_BYTES, Label, Node, PageLabel


class PrefixHandle:
    """A locked path from the root: its pages are neither evicted nor reused until ``release``,
    which is idempotent.

    A context manager whose exit releases. Made by ``match`` and moved down by ``extend``, never by
    hand.
    """

    __slots__ = ("_node", "_tree", "namespace", "num_tokens")

    def __init__(self, tree: RadixTree, node: Node, namespace: str, num_tokens: int) -> None:
        self._tree = tree
        self._node: Node | None = node
        self.namespace = namespace
        self.num_tokens = num_tokens
        """Length of the path in tokens, a multiple of the page size; written by match and extend,
        kept after release."""

    @property
    def node(self) -> Node:
        """Where the path ends. Asserts that the handle is not released."""
        assert self._node is not None, "the handle is released"
        return self._node

    def move(self, node: Node, num_tokens: int) -> None:
        """For the tree, which has moved the lock."""
        self._node, self.num_tokens = node, num_tokens

    def pages(self) -> Ids:
        """The page numbers of the path in order, num_tokens // page_size of them, read-only. Not
        after release."""
        parts = []
        node: Node | None = self.node
        while node is not None:
            parts.append(node.pages)
            node = node.parent
        return unpack_ids(b"".join(reversed(parts)))

    def release(self) -> None:
        node, self._node = self._node, None
        if node is not None:
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


class RadixTree:
    """Cached prefixes per namespace; namespaces never share.

    Invariants: a node's lock count is the number of handles that end at or below it, so an unlocked
    node has nothing locked below; a node's last use is at least its children's; every unlocked leaf
    is in the eviction queue. No operation recurses.
    """

    def __init__(self, page_size: int, policy: Lru | None = None) -> None:
        """``policy``: of eviction, lru if not given. Raises ValueError for a page size below 1."""
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}.")
        self.page_size = page_size
        self.evictable_tokens = 0
        self.locked_tokens = 0
        self._stride = page_size * TOKEN_BYTES
        self._policy = policy or Lru()
        self._root = Node(parent=None, label=b"", key=b"", pages=b"", rank=self._policy.fresh(0))
        self._leaves = EvictionQueue(self._policy)
        self._tick = 0

    def match_len(self, ids: Ids, namespace: str) -> int:
        """Tokens of ``ids`` that are cached, floored to whole pages. Changes nothing."""
        if not self._knows_first_page(ids, namespace):
            return 0
        _, matched, _ = self._descend(self._root, self._whole_pages(ids), namespace)
        return matched // TOKEN_BYTES

    def trace(self, ids: Ids, namespace: str) -> tuple[int, tuple[int, ...]]:
        """Like :meth:`match_len`, and the nodes the match runs through as numbers, from below the
        root; the last may be matched in part."""
        if not self._knows_first_page(ids, namespace):
            return 0, ()
        end, matched, _ = self._descend(self._root, self._whole_pages(ids), namespace)
        return matched // TOKEN_BYTES, tuple(id(node) for node in reversed(list(self._path(end))))

    def num_unlocked_by(self, handles: Iterable[PrefixHandle]) -> int:
        """Tokens that would become evictable if exactly these handles were released. Changes
        nothing."""
        locks = Counter(node for handle in handles for node in self._path(handle.node))
        return sum(node.num_tokens for node, count in locks.items() if node.lock_ref == count)

    def match(self, ids: Ids, namespace: str) -> PrefixHandle:
        """Lock and refresh the longest cached prefix of ``ids``, floored to whole pages."""
        node, matched, rest = self._descend(self._root, self._whole_pages(ids), namespace)
        if rest:
            node = self._split(node, rest)
        self._refresh(node)
        self._lock(node, self._root)
        return PrefixHandle(self, node, namespace, matched // TOKEN_BYTES)

    def touch(self, ids: Ids, namespace: str) -> None:
        """Refresh the recency of the longest cached prefix of ``ids`` (of a whole edge if the
        prefix ends inside it)."""
        self._refresh(self._descend(self._root, self._whole_pages(ids), namespace)[0])

    def count_hit(self, handle: PrefixHandle, priority: int) -> None:
        """A request of this priority was admitted over the handle's path."""
        for node in self._path(handle.node):
            node.rank = self._policy.hit(node.rank, priority)

    def extend(self, handle: PrefixHandle, ids: Ids, pages: Ids, priority: int = 0) -> int:
        """Append ``ids`` (whole pages) to the handle's path and move its lock and length down to
        their end.

        ``pages`` holds one page per page of ids, ``priority`` is the request's. Returns how many of
        the tokens the tree already had; the pages of the others are the tree's from now on.
        """
        data, page_data, top = pack_ids(ids), pack_ids(pages), handle.node
        assert len(data) % self._stride == 0, "only whole pages can be cached"
        node, matched, rest = self._descend(top, data, handle.namespace)
        if rest:
            node = self._split(node, rest)
        if matched < len(data):
            node = self._attach(
                node, data[matched:], page_data[matched // self.page_size :], handle.namespace
            )
        self._refresh(node)
        self._lock(node, top)
        handle.move(node, handle.num_tokens + len(ids))
        for above in self._path(node):
            above.rank = self._policy.grow(above.rank, priority, handle.num_tokens)
        return matched // TOKEN_BYTES

    def unlock(self, node: Node) -> None:
        """Take one lock off the path that ends at ``node``."""
        end = node
        while node.parent is not None:
            node.lock_ref -= 1
            if node.lock_ref == 0:
                self.locked_tokens -= node.num_tokens
                self.evictable_tokens += node.num_tokens
            node = node.parent
        if end.parent is not None and end.is_evictable:
            self._leaves.push(end)

    def evict(self, num_tokens: int) -> Ids:
        """Give up unlocked leaves, whole ones, until at least ``num_tokens`` are gone or none is
        left. Returns their pages."""
        given_up: list[bytes] = []
        goal = max(self.evictable_tokens - num_tokens, 0)
        while self.evictable_tokens > goal:
            node = self._leaves.pop()
            assert node is not None, "evictable tokens without an unlocked leaf"
            parent = node.parent
            assert parent is not None, "the root is never queued"
            parent.drop(node)
            self.evictable_tokens -= node.num_tokens
            given_up.append(node.pages)
            if parent is not self._root and parent.is_evictable:
                self._leaves.push(parent)
        return unpack_ids(b"".join(given_up))

    def _knows_first_page(self, ids: Ids, namespace: str) -> bool:
        """The answer for most of a long queue, without packing whole prompts."""
        page = pack_ids(ids[: self.page_size])
        return (
            len(page) == self._stride
            and self._label(self._root, page, namespace) in self._root.children
        )

    def _path(self, node: Node) -> Iterator[Node]:
        """From ``node`` up, the root excluded."""
        while node.parent is not None:
            yield node
            node = node.parent

    def _whole_pages(self, ids: Ids) -> bytes:
        return pack_ids(ids[: len(ids) // self.page_size * self.page_size])

    def _page_label(self, page: bytes) -> PageLabel:
        return page if self.page_size > 1 else int.from_bytes(page, "little")

    def _label(self, parent: Node, page: bytes, namespace: str) -> Label:
        label = self._page_label(page)
        return (namespace, label) if parent is self._root else label

    def _descend(self, node: Node, data: bytes, namespace: str) -> tuple[Node, int, int]:
        """Follow ``data`` (whole pages) from the end of ``node`` as far as the tree agrees, floored
        to pages.

        Returns the last node reached, the bytes matched, and the bytes of that node's edge that are
        beyond the match:

            |-- node --|-- child --|-------- last --------|
                       |<---- matched ---->|<--- rest --->|
        """
        stride, matched = self._stride, 0
        while matched < len(data):
            child = node.children.get(
                self._label(node, data[matched : matched + stride], namespace)
            )
            if child is None:
                break
            node, agreed = child, _agreement(child.key, data, matched) // stride * stride
            matched += agreed
            if agreed < len(child.key):
                return node, matched, len(child.key) - agreed
        return node, matched, 0

    def _split(self, node: Node, rest: int) -> Node:
        """Cut ``node``'s edge so that its last ``rest`` bytes stay with it; returns the new node
        above, which gets the others.

        The lower part keeps the identity, so handles that end there stay right; the upper part
        inherits their locks.
        """
        parent = node.parent
        assert parent is not None
        cut = len(node.key) - rest
        page_cut = cut // self.page_size
        upper = Node(
            parent, node.label, node.key[:cut], node.pages[:page_cut], node.rank, node.lock_ref
        )
        parent.adopt(upper)
        node.label = self._page_label(node.key[cut : cut + self._stride])
        node.key, node.pages = node.key[cut:], node.pages[page_cut:]
        upper.adopt(node)
        if node.is_evictable:
            self._leaves.push(node)  # it begins later than before, which may lower its key
        return upper

    def _attach(self, parent: Node, key: bytes, pages: bytes, namespace: str) -> Node:
        """A new leaf, which the caller locks (it is not in the eviction queue)."""
        label = self._label(parent, key[: self._stride], namespace)
        node = Node(parent, label, key, pages, self._policy.fresh(self._tick))
        parent.adopt(node)
        self.evictable_tokens += node.num_tokens
        return node

    def _refresh(self, end: Node) -> None:
        self._tick += 1
        node: Node | None = end
        while node is not None:
            node.rank = self._policy.use(node.rank, self._tick)
            node = node.parent

    def _lock(self, node: Node, top: Node) -> None:
        """Lock the path from ``node`` up to ``top``, which is excluded: what is above is locked
        already (or is the root)."""
        while node is not top:
            assert node.parent is not None
            if node.lock_ref == 0:
                self.evictable_tokens -= node.num_tokens
                self.locked_tokens += node.num_tokens
            node.lock_ref += 1
            node = node.parent

    def check(self) -> list[str]:
        """Every violated invariant, as a sentence; empty = sound. O(tree)."""
        problems: list[str] = []
        evictable = locked = 0
        for node in self._nodes():
            problems += [
                f"A node of {node.num_tokens} tokens {what}." for what in self._faults(node)
            ]
            evictable += 0 if node.lock_ref else node.num_tokens
            locked += node.num_tokens if node.lock_ref else 0
        if self._root.lock_ref:
            problems.append("The root is locked.")
        if (evictable, locked) != (self.evictable_tokens, self.locked_tokens):
            counted = f"{self.evictable_tokens} evictable and {self.locked_tokens} locked tokens"
            problems.append(f"The tree counts {counted} but holds {evictable} and {locked}.")
        return problems

    def _faults(self, node: Node) -> list[str]:
        parent, children = node.parent, node.children.values()
        if parent is None or parent.children.get(node.label) is not node:
            return ["is not its parent's child"]
        page_label = node.label[1] if isinstance(node.label, tuple) else node.label
        faults = {
            "has a namespace in its label or not, against its place": (
                isinstance(node.label, tuple) != (parent is self._root)
            ),
            "is not whole pages": not node.key or len(node.key) % self._stride != 0,
            "has another number of pages than its tokens fill": (
                len(node.pages) != len(node.key) // self.page_size
            ),
            "has a label that is not its first page": (
                page_label != self._page_label(node.key[: self._stride])
            ),
            "has a negative lock count": node.lock_ref < 0,
            "has fewer locks than its children together": (
                node.lock_ref < sum(child.lock_ref for child in children)
            ),
            "was used later than its parent": (
                self._policy.last_use(node.rank) > self._policy.last_use(parent.rank)
            ),
            "can be evicted but is not queued": node.is_evictable and node.queued is None,
            "is queued behind its place": (
                node.is_evictable
                and node.queued is not None
                and node.queued > self._policy.key(node)
            ),
        }
        return [fault for fault, holds in faults.items() if holds]

    def all_pages(self) -> Ids:
        """The pages of every node, in no order. O(tree)."""
        return unpack_ids(b"".join(node.pages for node in self._nodes()))

    def _nodes(self) -> Iterator[Node]:
        """Every node but the root, parents first."""
        todo = list(self._root.children.values())
        while todo:
            node = todo.pop()
            todo.extend(node.children.values())
            yield node


def _agreement(edge: bytes, data: bytes, start: int) -> int:
    """How many bytes of ``edge``, a multiple of TOKEN_BYTES, agree with ``data`` from ``start``
    on."""
    if data.startswith(edge, start):
        return len(edge)
    num = min(len(edge), len(data) - start) // TOKEN_BYTES
    differs = np.frombuffer(edge, "<i4", num) != np.frombuffer(data, "<i4", num, start)
    first = int(differs.argmax())
    return TOKEN_BYTES * (first if differs[first] else num)
