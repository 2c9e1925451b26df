"""Collects the changes of a radix tree, block by block, as KV cache events (``core.kv_events``)."""

from __future__ import annotations

import msgspec
import numpy as np

from setpoint.core.kv_events import (
    DIGEST_BYTES,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    block_digests,
    block_hashes,
    first_digest,
)
from setpoint.core.messages import Blocks
from setpoint.scheduler.cache.node import TOKEN_BYTES, Node

_encoder = msgspec.msgpack.Encoder()


class BlockNews:
    """Listens to one tree from its beginning."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._digests: dict[Node, bytes] = {}
        """Stretch -> the digests of its blocks. To compute them again from the root for each
        evicted stretch would take time that grows with the square of a conversation's length."""
        self._events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []

    def gained(self, node: Node) -> None:
        assert node.parent is not None
        above = self._digests.get(node.parent, b"")[-DIGEST_BYTES:]
        before = above
        if not above:
            assert isinstance(node.label, tuple), "the label below the root has the namespace"
            before = first_digest(node.label[0])
        digests = block_digests(node.key, before, self._page_size * TOKEN_BYTES)
        self._digests[node] = digests
        self._events.append(
            BlockStored(
                block_hashes(digests),
                block_hashes(above)[0] if above else None,
                np.frombuffer(node.key, "<i4").tolist(),
                self._page_size,
            )
        )

    def lost(self, node: Node) -> None:
        hashes = block_hashes(self._digests.pop(node))
        last = self._events[-1] if self._events else None
        if not self._digests:
            self.cleared()
        elif isinstance(last, BlockRemoved):
            last.block_hashes.extend(hashes)
        else:
            self._events.append(BlockRemoved(hashes))

    def split(self, upper: Node, lower: Node) -> None:
        digests = self._digests[lower]
        cut = len(upper.key) // (self._page_size * TOKEN_BYTES) * DIGEST_BYTES
        self._digests[upper], self._digests[lower] = digests[:cut], digests[cut:]

    def cleared(self) -> None:
        self._digests.clear()
        self._events = [AllBlocksCleared()]

    def take(self) -> Blocks | None:
        if not self._events:
            return None
        events, self._events = self._events, []
        return Blocks(_encoder.encode(events))
