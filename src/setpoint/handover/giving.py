"""The prefill side's conversation with one connection of a decode server: greeting, then bootstrap
rooms."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

import xxhash

from setpoint.core.handover import PageStore
from setpoint.core.handshake import is_proof, new_bytes, proof
from setpoint.handover.channel import Channel
from setpoint.handover.frames import (
    MAX_GREETING,
    Begin,
    Cancel,
    Challenge,
    Chunk,
    End,
    Failed,
    Fetch,
    Free,
    HandoverError,
    Hello,
    Message,
    PeerRefusal,
    Ping,
    Taken,
    Welcome,
    refusal,
    shortened,
)
from setpoint.handover.identity import Identity
from setpoint.handover.offers import Offer, Offers
from setpoint.handover.segments import NUM_SEGMENTS, OwnedShare, Segments, segment_size

MAX_TRANSFERS = 8192
"""Most transfers that one connection may have open."""
NO_PROOF = "the servers do not know the same key: give both the same --api-key"


@dataclass(slots=True, frozen=True)
class Terms:
    """What a prefill engine tells every decode server."""

    store: PageStore
    identity: Identity
    key: bytes
    """The key that authenticates transfers (``core.handshake``)."""
    checksums: bool
    share: bool = True
    """Whether memory may be shared within a machine."""


async def greet(channel: Channel, terms: Terms) -> Giving:
    """Find out who has connected; whoever does not know the key learns a random number and no more.
    Raises HandoverError, after having told the peer why, if it may not or cannot use this engine's
    pages."""
    nonce = new_bytes()
    await channel.send(Challenge(nonce))
    hello = await channel.receive(MAX_GREETING)
    if not isinstance(hello, Hello):
        raise await _refused(channel, "a greeting was expected")
    if not is_proof(hello.proof, terms.key, "decode", hello.nonce, nonce):
        raise await _refused(channel, NO_PROOF)
    size = segment_size(terms.store.row_bytes)
    share = None
    if terms.share:
        with suppress(OSError, AttributeError):  # no such memory on this system
            share = OwnedShare(size, NUM_SEGMENTS)
    try:
        checksums = terms.checksums or hello.checksums
        own = proof(terms.key, "prefill", nonce, hello.nonce)
        invitation = None if share is None else share.invitation
        await channel.send(Welcome(own, terms.identity, invitation, checksums))
        begin = await channel.receive(MAX_GREETING)
    finally:
        if share is not None:
            share.close()
    if isinstance(begin, PeerRefusal):
        raise HandoverError(begin.reason)
    if not isinstance(begin, Begin) or (begin.is_shared and share is None):
        raise HandoverError("the greeting was not answered")
    segments = (
        share.segments
        if share is not None and begin.is_shared
        else Segments.own(size, NUM_SEGMENTS)
    )
    return Giving(channel, terms, segments, is_shared=begin.is_shared, checksums=checksums)


async def _refused(channel: Channel, reason: str) -> HandoverError:
    with suppress(HandoverError):
        await channel.send(refusal(reason))
    return HandoverError(reason)


class Giving:
    """Sends one offer's pages after the other. Implements ``offers.Receiver``."""

    def __init__(
        self,
        channel: Channel,
        terms: Terms,
        segments: Segments,
        *,
        is_shared: bool,
        checksums: bool,
    ) -> None:
        self.channel = channel
        self.is_shared = is_shared
        self._store = terms.store
        self._segments = segments
        self._checksums = checksums
        self._free = set(range(len(segments.views)))
        self._queue: deque[Offer | Message] = deque()
        self._changed = asyncio.Event()
        """Something is queued, or a segment is free."""
        self._open: set[int] = set()
        """The decode server's transfers that have not ended."""

    def send(self, offer: Offer) -> None:
        self._queue.append(offer)
        self._changed.set()

    def refuse(self, transfer: int, reason: str) -> None:
        self._open.discard(transfer)
        self._queue.append(Failed(transfer, shortened(reason)))
        self._changed.set()

    async def run(self, offers: Offers) -> str:
        """Serve until the connection ends; returns why."""
        try:
            return await self.channel.run(self._write(), self._read(offers))
        finally:
            offers.lost(self, f"The connection to the decode server: {self.channel.failure}.")

    async def _read(self, offers: Offers) -> None:
        while True:
            match await self.channel.receive(MAX_GREETING):
                case Fetch() as fetch:
                    if fetch.transfer in self._open or len(self._open) >= MAX_TRANSFERS:
                        raise HandoverError("a transfer was asked for twice")
                    self._open.add(fetch.transfer)
                    offers.fetch(self, fetch)
                case Cancel(transfer) | Taken(transfer) if transfer not in self._open:
                    pass  # it has ended meanwhile
                case Cancel(transfer):
                    self._open.discard(transfer)
                    offers.cancelled(self, transfer)
                case Taken(transfer):
                    self._open.discard(transfer)
                    if not offers.taken(self, transfer):
                        raise HandoverError("a transfer that was not sent is said to have arrived")
                case Free(segment):
                    if segment in self._free or segment >= len(self._segments.views):
                        raise HandoverError("a segment was given back that is not in use")
                    self._free.add(segment)
                    self._changed.set()
                case Ping():
                    pass
                case other:
                    raise HandoverError(f"{type(other).__name__} was not expected")

    async def _write(self) -> None:
        while True:
            while not self._queue:
                await self._change()
            item = self._queue.popleft()
            if isinstance(item, Offer):
                await self._send(item)
            else:
                await self.channel.send(item)

    async def _send(self, offer: Offer) -> None:
        """Send an offer's pages, in as many chunks as it takes."""
        assert offer.rows is not None
        assert offer.handed is not None
        width, row_bytes = self._store.width, self._store.row_bytes
        num_rows, step = len(offer.rows) // width, self._segments.size // row_bytes
        for first in range(0, num_rows, step):
            while not self._free and not offer.is_over:
                await self._change()
            if offer.is_over:
                return
            count = min(step, num_rows - first)
            segment = self._free.pop()
            view = self._segments.views[segment][: count * row_bytes]
            self._store.read_into(offer.rows[first * width : (first + count) * width], view)
            checksum = xxhash.xxh3_64_digest(view) if self._checksums else b""
            offer.num_bytes += len(view)
            await self.channel.send(
                Chunk(offer.transfer, segment, first, count, len(view), checksum),
                None if self.is_shared else view,
            )
        if not offer.is_over:
            await self.channel.send(End(offer.transfer, num_rows, offer.handed))

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
