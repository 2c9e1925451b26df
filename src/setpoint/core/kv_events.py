"""KV cache events in the format of SGLang 0.5.23. They tell routers and other programs, block by
block, what the cache of an engine gains and loses. A block is a page of tokens together with all
tokens before it.

A batch is the msgpack array [time, events, rank]; each event is a map whose "type" is its class.
"""

from __future__ import annotations

import struct
from typing import Literal

import msgspec

MEDIUM = "GPU"
"""SGLang's word for the memory from which an engine computes, even if it is a CPU's memory."""
_FIRST_NUMBER = struct.Struct(">q24x")


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """Consecutive blocks of one prompt are now cached."""

    block_hashes: list[int]
    parent_block_hash: int | None
    """The block before the first of these blocks; None if the first one begins the prompt."""
    token_ids: list[int]
    """The tokens of all these blocks."""
    block_size: int
    lora_id: int | None = None
    medium: str = MEDIUM


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    block_hashes: list[int]
    medium: str = MEDIUM


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """The cache is empty."""


class PublisherConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """--kv-events-config: keys, meanings and defaults are SGLang's."""

    publisher: str = "null"
    """"zmq", or "null": nothing is published."""
    endpoint: str = "tcp://*:5557"
    bind: bool | None = None
    """Whether the socket is bound to the endpoint or connects to it; None: see ``binds``."""
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    """Maximum number of batches that are kept for replay."""
    hwm: int = 100_000
    """Maximum number of batches that wait for one subscriber."""
    max_queue_size: int | None = None
    """Has no effect: every batch goes to ZeroMQ at once."""
    topic: str = ""
    format: Literal["default", "dynamo"] = "default"
    """Has no effect: in both formats, Setpoint's hashes include the namespace, and there are no
    adapters."""

    @property
    def binds(self) -> bool:
        if self.bind is not None:
            return self.bind
        return self.endpoint.startswith("ipc://") or any(
            host in self.endpoint for host in ("*", "::", "0.0.0.0")
        )


def block_hashes(digests: bytes) -> list[int]:
    """The hashes of the blocks with these digests: the first eight bytes of each digest, as a
    number."""
    return [number for (number,) in _FIRST_NUMBER.iter_unpack(digests)]
