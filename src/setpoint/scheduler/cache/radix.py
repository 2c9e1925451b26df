"""The radix tree of cached prefixes: finds, locks, extends and evicts stretches of whole pages.

Works on token ids and page numbers as packed int32 bytes. It knows neither which pages are free or
held outside the tree (``manager``), nor the order in which policies evict leaves (``evict``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from setpoint.core.request import Ids, pack_ids, unpack_ids
from setpoint.scheduler.cache.evict import EvictionQueue, Lru
from setpoint.scheduler.cache.handle import NO_PAGES, PrefixHandle
from setpoint.scheduler.cache.news import TreeListener
from setpoint.scheduler.cache.node import TOKEN_BYTES, Label, PageLabel, TreeNode
from setpoint.scheduler.cache.window_pages import WindowPages


class RadixTree:
    """Cached prefixes per namespace; namespaces never share.

    Invariants: a node's lock count is the number of handles that end at or below it, so an unlocked
    node has nothing locked below; a node's last use is at least its children's; every unlocked leaf
    is in the eviction queue. No operation recurses.
    """

    def __init__(
        self,
        page_size: int,
        policy: Lru | None = None,
        *,
        num_full: int = 1,
        windows: WindowPages | None = None,
    ) -> None:
        """policy: the eviction policy, by default lru. num_full: number of groups that keep every
        position. windows: the pages of the other groups, if there are any. Raises ValueError for a
        page size below 1."""
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}.")
        self.page_size = page_size
        self.evictable_tokens = 0
        """Tokens of unlocked nodes; ``locked_tokens`` counts those of the others."""
        self.locked_tokens = 0
        self.num_full = num_full
        self.windows = windows
        self.row_bytes = TOKEN_BYTES * (num_full if windows is None else windows.row.width)
        self.stride = page_size * TOKEN_BYTES
        self.policy = policy or Lru()
        self.root = TreeNode(parent=None, label=b"", key=b"", pages=b"", rank=self.policy.fresh(0))
        self._leaves = EvictionQueue(self.policy)
        self._tick = 0
        self.listeners: list[TreeListener] = []
        """Who is told what the tree gains and loses; the list is the KVCache's."""

    @property
    def num_evictable(self) -> int:
        """Pool tokens that ``evict`` can give."""
        if self.windows is None:
            return self.evictable_tokens
        return self.evictable_tokens * self.num_full + self.windows.num_evictable * self.page_size

    @property
    def num_locked(self) -> int:
        """Pool tokens of the tree that are held."""
        if self.windows is None:
            return self.locked_tokens
        return self.locked_tokens * self.num_full + self.windows.num_locked * self.page_size

    def match_len(self, ids: Ids, namespace: str) -> int:
        """Number of tokens of ``ids`` that are cached, floored to whole pages. Changes nothing."""
        if not self._knows_first_page(ids, namespace):
            return 0
        return self._find(self._whole_pages(ids), namespace)[1] // TOKEN_BYTES

    def trace(self, ids: Ids, namespace: str) -> tuple[int, tuple[int, ...]]:
        """(result of :meth:`match_len`, numbers of the nodes that the match runs through, from
        below the root). The last one may be matched in part."""
        if not self._knows_first_page(ids, namespace):
            return 0, ()
        end, matched, _ = self._find(self._whole_pages(ids), namespace)
        return matched // TOKEN_BYTES, tuple(id(node) for node in reversed(list(self._path(end))))

    def num_unlocked_by(self, handles: Iterable[PrefixHandle]) -> int:
        """Tokens that would become evictable if exactly these handles were released. Changes
        nothing."""
        locks = Counter(node for handle in handles for node in self._path(handle.node))
        return sum(node.num_tokens for node, count in locks.items() if node.lock_ref == count)

    def match(self, ids: Ids, namespace: str) -> PrefixHandle:
        """Lock and refresh the longest cached prefix of ``ids``, floored to whole pages."""
        node, matched, rest = self._find(self._whole_pages(ids), namespace)
        if rest:
            node = self._split(node, rest)
        self._refresh(node)
        self._lock(node, self.root)
        handle = PrefixHandle(self, node, namespace, matched // TOKEN_BYTES)
        if self.windows is not None:
            reached = self.windows.rows_of(handle.pages())[:, self.num_full :]
            handle.needed = reached[reached != 0]
            self.windows.need(handle.needed)
        return handle

    def unneed(self, handle: PrefixHandle, pages: Ids, first_row: int) -> Ids:
        """Record that one sequence fewer needs these window pages, which belong to rows from
        ``first_row`` on, on the handle's path or beyond it. Returns the pages among them that are
        not the tree's."""
        assert self.windows is not None
        path, start = [], handle.num_tokens
        for node in self._path(handle.node):
            start -= node.num_tokens
            path.append(node)
            if start <= first_row * self.page_size:
                break
        return self.windows.unneed(pages, path)

    def touch(self, ids: Ids, namespace: str) -> None:
        """Refresh the recency of the longest cached prefix of ``ids`` (of a whole edge if the
        prefix ends inside it)."""
        self._refresh(self._descend(self.root, self._whole_pages(ids), namespace)[0])

    def count_hit(self, handle: PrefixHandle, priority: int) -> None:
        """Record that a request of this priority was admitted with the handle's path."""
        for node in self._path(handle.node):
            node.rank = self.policy.hit(node.rank, priority)

    def extend(
        self, handle: PrefixHandle, ids: Ids, pages: Ids, priority: int = 0
    ) -> tuple[Ids, Ids]:
        """Append ``ids`` (whole pages) to the handle's path and move its lock and length down to
        their end.

        ``pages`` holds one page row per page of ids, ``priority`` is the request's. Returns (pages
        of full groups that stay the caller's, because the tree already had their tokens; pages of
        the tree that the caller's replaced, which are free now). All other pages belong to the tree
        from now on.
        """
        data, page_data, top = pack_ids(ids), pack_ids(pages), handle.node
        assert len(data) % self.stride == 0, "only whole pages can be cached"
        node, matched, rest = self._descend(top, data, handle.namespace)
        if rest:
            node = self._split(node, rest)
        known = matched // self.stride * self.row_bytes
        if self.windows is None:
            private, freed = unpack_ids(page_data[:known]), NO_PAGES
        else:
            private, freed = self._merge(node, top, page_data[:known])
        if matched < len(data):
            node = self._attach(node, data[matched:], page_data[known:], handle.namespace)
        self._refresh(node)
        self._lock(node, top)
        handle.move(node, handle.num_tokens + len(ids))
        for above in self._path(node):
            above.rank = self.policy.grow(above.rank, priority, handle.num_tokens)
        return private, freed

    def _merge(self, node: TreeNode, top: TreeNode, page_data: bytes) -> tuple[Ids, Ids]:
        """Merge the caller's rows into the stretches between ``top`` and the end of ``node``."""
        assert self.windows is not None
        private, freed, end = [], [], len(page_data)
        while node is not top:
            begin = end - len(node.pages)
            merged = self.windows.merge(node, self.windows.rows_of(page_data[begin:end]))
            private.append(merged[0])
            freed.append(merged[1])
            assert node.parent is not None
            node, end = node.parent, begin
        if not private:
            return NO_PAGES, NO_PAGES
        return np.concatenate(private), np.concatenate(freed)

    def unlock(self, node: TreeNode) -> None:
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
        """Evict whole unlocked leaves until at least ``num_tokens`` pool tokens are freed or no
        leaf is left. Returns their pages.

        Window pages that no match is likely to need are evicted before the leaves, the others after
        them.
        """
        if self.windows is not None:
            return self._evict_with_windows(self.windows, -(-num_tokens // self.page_size))
        given_up: list[bytes] = []
        goal = max(self.evictable_tokens - num_tokens, 0)
        while self.evictable_tokens > goal:
            node = self._pop_leaf()
            assert node is not None, "evictable tokens without an unlocked leaf"
            given_up.append(node.pages)
        return unpack_ids(b"".join(given_up))

    def oldest(self, num_tokens: int) -> list[tuple[Ids, str]]:
        """(path from the root, namespace) of the leaves that would be evicted first, until they
        have so many tokens together."""
        found: list[tuple[Ids, str]] = []
        for node in self._leaves.first(64):
            path = list(self._path(node))
            label = path[-1].label
            assert isinstance(label, tuple), "the label below the root has the namespace"
            found.append((unpack_ids(b"".join(above.key for above in reversed(path))), label[0]))
            num_tokens -= node.num_tokens
            if num_tokens <= 0:
                break
        return found

    def _evict_with_windows(self, windows: WindowPages, num_pages: int) -> Ids:
        def give_up_leaf() -> Ids | None:
            node = self._pop_leaf()
            return None if node is None else windows.remove(node)

        given_up = [NO_PAGES]
        for give_up in (windows.give_up_loose, give_up_leaf, windows.give_up_rest):
            while num_pages > 0 and (pages := give_up()) is not None:
                given_up.append(pages)
                num_pages -= len(pages)
        return np.concatenate(given_up)

    def _pop_leaf(self) -> TreeNode | None:
        """Remove the unlocked leaf that is to be evicted first from the tree; None if there is
        none."""
        node = self._leaves.pop()
        if node is None:
            return None
        parent = node.parent
        assert parent is not None, "the root is never queued"
        for listener in self.listeners:
            listener.lost(node)
        parent.drop(node)
        self.evictable_tokens -= node.num_tokens
        if parent is not self.root and parent.is_evictable:
            self._leaves.push(parent)
        if self.windows is not None:
            self.windows.look_again(parent)
        return node

    def _knows_first_page(self, ids: Ids, namespace: str) -> bool:
        """Whether the first page of ``ids`` is cached. For most of a long queue it is not, so that
        whole prompts need not be packed."""
        page = pack_ids(ids[: self.page_size])
        return (
            len(page) == self.stride
            and self._label(self.root, page, namespace) in self.root.children
        )

    def pages_above(self, node: TreeNode) -> Ids:
        """The page rows from the root to the end of ``node``, flat: see ``PrefixHandle.pages``."""
        pages = self._pages_to(node)
        if self.windows is None:
            return unpack_ids(pages)
        reached = self.windows.reached(self.windows.rows_of(pages)).ravel()
        reached.flags.writeable = False
        return reached

    def _pages_to(self, node: TreeNode) -> bytes:
        parts = [above.pages for above in self._path(node)]
        return b"".join(reversed(parts))

    def _find(self, data: bytes, namespace: str) -> tuple[TreeNode, int, int]:
        """Find the longest cached prefix that a sequence can continue. Returns the same as
        ``_descend``."""
        node, matched, rest = self._descend(self.root, data, namespace)
        if self.windows is None or not matched:
            return node, matched, rest
        rows = self.windows.rows_of(self._pages_to(node))[: matched // self.stride]
        usable = self.windows.num_usable(rows) * self.stride
        if usable == matched:
            return node, matched, rest
        return self._descend(self.root, data[:usable], namespace)

    def _path(self, node: TreeNode) -> Iterator[TreeNode]:
        """The nodes from ``node`` up, the root excluded."""
        while node.parent is not None:
            yield node
            node = node.parent

    def _whole_pages(self, ids: Ids) -> bytes:
        return pack_ids(ids[: len(ids) // self.page_size * self.page_size])

    def page_label(self, page: bytes) -> PageLabel:
        return page if self.page_size > 1 else int.from_bytes(page, "little")

    def _label(self, parent: TreeNode, page: bytes, namespace: str) -> Label:
        label = self.page_label(page)
        return (namespace, label) if parent is self.root else label

    def _descend(self, node: TreeNode, data: bytes, namespace: str) -> tuple[TreeNode, int, int]:
        """Follow ``data`` (whole pages) from the end of ``node`` as far as the tree agrees, floored
        to pages.

        Returns the last node reached, the bytes matched, and the bytes of that node's edge that are
        beyond the match:

            |-- node --|-- child --|-------- last --------|
                       |<---- matched ---->|<--- rest --->|
        """
        stride, matched = self.stride, 0
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

    def _split(self, node: TreeNode, rest: int) -> TreeNode:
        """Cut ``node``'s edge so that its last ``rest`` bytes stay with it; returns the new node
        above, which gets the others.

        The lower part keeps the identity, so handles that end there stay valid; the upper part
        inherits their locks.
        """
        parent = node.parent
        assert parent is not None
        cut = len(node.key) - rest
        page_cut = cut // self.stride * self.row_bytes
        upper = TreeNode(
            parent, node.label, node.key[:cut], node.pages[:page_cut], node.rank, node.lock_ref
        )
        parent.adopt(upper)
        node.label = self.page_label(node.key[cut : cut + self.stride])
        node.key, node.pages = node.key[cut:], node.pages[page_cut:]
        upper.adopt(node)
        for listener in self.listeners:
            listener.split(upper, node)
        if self.windows is not None:
            self.windows.split(upper, node)
        if node.is_evictable:
            self._leaves.push(node)  # it begins later than before, which may lower its key
        return upper

    def _attach(self, parent: TreeNode, key: bytes, pages: bytes, namespace: str) -> TreeNode:
        """Attach a new leaf, which the caller must lock: it is not in the eviction queue."""
        label = self._label(parent, key[: self.stride], namespace)
        node = TreeNode(parent, label, key, pages, self.policy.fresh(self._tick))
        parent.adopt(node)
        self.evictable_tokens += node.num_tokens
        for listener in self.listeners:
            listener.gained(node)
        if self.windows is not None:
            self.windows.adopt(self.windows.rows_of(pages))
            self.windows.look_again(parent)
        return node

    def _refresh(self, end: TreeNode) -> None:
        self._tick += 1
        node: TreeNode | None = end
        while node is not None:
            node.rank = self.policy.use(node.rank, self._tick)
            node = node.parent

    def _lock(self, node: TreeNode, top: TreeNode) -> None:
        """Lock the path from ``node`` up to ``top``, which is excluded: ``top`` and all above are
        locked already (or ``top`` is the root)."""
        while node is not top:
            assert node.parent is not None
            if node.lock_ref == 0:
                self.evictable_tokens -= node.num_tokens
                self.locked_tokens += node.num_tokens
            node.lock_ref += 1
            node = node.parent

    def all_pages(self) -> Ids:
        """The pages of all nodes, in no particular order. O(tree)."""
        pages = unpack_ids(b"".join(node.pages for node in self.nodes()))
        return pages if self.windows is None else pages[pages != 0]

    def nodes(self) -> Iterator[TreeNode]:
        """Every node but the root, parents first."""
        todo = list(self.root.children.values())
        while todo:
            node = todo.pop()
            todo.extend(node.children.values())
            yield node


def _agreement(edge: bytes, data: bytes, start: int) -> int:
    """Number of bytes, a multiple of TOKEN_BYTES, at the beginning of ``edge`` that agree with
    ``data`` from ``start`` on."""
    if data.startswith(edge, start):
        return len(edge)
    num = min(len(edge), len(data) - start) // TOKEN_BYTES
    differs = np.frombuffer(edge, "<i4", num) != np.frombuffer(data, "<i4", num, start)
    first = int(differs.argmax())
    return TOKEN_BYTES * (first if differs[first] else num)
