"""Collects the changes of a radix tree, block by block, as KV cache events (``core.kv_events``)."""

from __future__ import annotations

import msgspec
import numpy as np

from setpoint.core.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    block_hashes,
)
from setpoint.core.messages import Blocks
from setpoint.scheduler.cache.node import TreeNode
from setpoint.scheduler.cache.stretch_digests import StretchDigests

_encoder = msgspec.msgpack.Encoder()


class BlockNews:
    """Listens to one tree from its beginning."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._digests = StretchDigests(page_size)
        self._events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []

    def gained(self, node: TreeNode) -> None:
        above, digests = self._digests.last_above(node), self._digests.add(node)
        self._events.append(
            BlockStored(
                block_hashes(digests),
                block_hashes(above)[0] if above else None,
                np.frombuffer(node.key, "<i4").tolist(),
                self._page_size,
            )
        )

    def lost(self, node: TreeNode) -> None:
        hashes = block_hashes(self._digests.pop(node))
        last = self._events[-1] if self._events else None
        if not self._digests:
            self.cleared()
        elif isinstance(last, BlockRemoved):
            last.block_hashes.extend(hashes)
        else:
            self._events.append(BlockRemoved(hashes))

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        self._digests.split(upper, lower)

    def cleared(self) -> None:
        self._digests.clear()
        self._events = [AllBlocksCleared()]

    def take(self) -> Blocks | None:
        if not self._events:
            return None
        events, self._events = self._events, []
        return Blocks(_encoder.encode(events))
