"""A subscriber to KV events, after SGLang 0.5.23's description of them and without our own code for
them: what it can decode, SGLang's and Dynamo's readers can."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import Any

import msgspec


class Event(msgspec.Struct, tag=True, omit_defaults=True, forbid_unknown_fields=True):
    pass


class BlockStored(Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(Event):
    pass


AnyEvent = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[AnyEvent]
    attn_dp_rank: int | None = None


BATCH = msgspec.msgpack.Decoder(Batch)
EVENTS = msgspec.msgpack.Decoder(list[AnyEvent])


Blocks = dict[int, tuple[int | None, tuple[int, ...]]]
"""Name of a block -> the block before it, and its tokens."""


class Subscriber:
    """What it believes that one cache holds."""

    def __init__(self) -> None:
        self.blocks: Blocks = {}
        self.seen: Counter[str] = Counter()

    def take(self, events: Iterable[AnyEvent]) -> None:
        for event in events:
            self.seen[type(event).__name__] += 1
            match event:
                case AllBlocksCleared():
                    self.blocks.clear()
                case BlockRemoved():
                    for name in event.block_hashes:
                        del self.blocks[name]  # a KeyError: it was never stored
                case BlockStored():
                    self._store(event)

    def _store(self, event: BlockStored) -> None:
        parent, size = event.parent_block_hash, event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes)
        assert parent is None or parent in self.blocks, "the block before was not stored"
        for index, name in enumerate(event.block_hashes):
            assert name not in self.blocks, "the block was stored already"
            tokens = event.token_ids[index * size : (index + 1) * size]
            self.blocks[name] = parent, tuple(tokens)
            parent = name


def blocks_of(tree: Any, page_size: int, seed_of: Callable[[str], bytes]) -> Blocks:
    """The blocks that a radix tree holds, by the names that SGLang gives them: a chain of SHA-256
    over the tokens as 32-bit numbers, of which the first eight bytes count. seed_of: where the
    chain of a namespace starts."""
    found: Blocks = {}
    todo: list[tuple[Any, bytes, int | None]] = [
        (node, seed_of(node.label[0]), None) for node in tree.root.children.values()
    ]
    while todo:
        node, digest, parent = todo.pop()
        for at in range(0, len(node.key), 4 * page_size):
            page = node.key[at : at + 4 * page_size]
            digest = sha256(digest + page).digest()
            name = int.from_bytes(digest[:8], "big", signed=True)
            found[name] = parent, tuple(memoryview(page).cast("i"))
            parent = name
        todo += [(child, digest, parent) for child in node.children.values()]
    return found
