"""KV cache events in the format of SGLang 0.5.23: what the cache of an engine gains and loses,
block by block, for routers and other programs outside. A block is a page of tokens together with
all tokens before it.

A batch is the msgpack array [time, events, rank]; each event is a map whose "type" is its class.
"""

from __future__ import annotations

import struct
from hashlib import sha256
from typing import Literal

import msgspec

MEDIUM = "GPU"
"""SGLang's word for the memory from which an engine computes, also where that is a CPU's."""
DIGEST_BYTES = 32
_FIRST_NUMBER = struct.Struct(">q24x")


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """Blocks that follow each other in one prompt are cached now."""

    block_hashes: list[int]
    parent_block_hash: int | None
    """The block before the first one; None: the prompt begins with it."""
    token_ids: list[int]
    """The tokens of all these blocks."""
    block_size: int
    lora_id: int | None = None
    medium: str = MEDIUM


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    block_hashes: list[int]
    medium: str = MEDIUM


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """Nothing is cached any more."""


class PublisherConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """--kv-events-config: keys, meanings and defaults are SGLang's."""

    publisher: str = "null"
    """"zmq", or "null": nothing is published."""
    endpoint: str = "tcp://*:5557"
    bind: bool | None = None
    """Whether the socket is bound to the endpoint or connects to it; None: see ``binds``."""
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    """Most batches that are kept for replay."""
    hwm: int = 100_000
    """Most batches that wait for one subscriber."""
    max_queue_size: int | None = None
    """Without effect: no batch waits before it reaches ZeroMQ."""
    topic: str = ""
    format: Literal["default", "dynamo"] = "default"
    """Without effect: in both, a namespace is part of the hash here, and there are no adapters."""

    @property
    def binds(self) -> bool:
        if self.bind is not None:
            return self.bind
        return self.endpoint.startswith("ipc://") or any(
            host in self.endpoint for host in ("*", "::", "0.0.0.0")
        )


def first_digest(namespace: str) -> bytes:
    """What the digest of a prompt's first block starts from."""
    if not namespace:
        return b""
    return sha256(b"setpoint-namespace\0" + namespace.encode(errors="surrogatepass")).digest()


def block_digests(data: bytes, before: bytes, stride: int) -> bytes:
    """The digests, joined, of the blocks of packed tokens (``stride`` bytes each) that follow the
    block whose digest is ``before``. Those of a prompt without a namespace are SGLang's."""
    found = []
    for at in range(0, len(data), stride):
        before = sha256(before + data[at : at + stride]).digest()
        found.append(before)
    return b"".join(found)


def block_hashes(digests: bytes) -> list[int]:
    """The names of the blocks that these are the digests of: the first eight bytes as a number."""
    return [number for (number,) in _FIRST_NUMBER.iter_unpack(digests)]
