"""The decode side's conversation on one connection to a prefill engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import xxhash

from setpoint.core.handover import PageStore, PromptReceived
from setpoint.core.handshake import is_proof, new_bytes, proof
from setpoint.core.request import Ids
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
)
from setpoint.handover.identity import Identity, differences
from setpoint.handover.segments import NUM_SEGMENTS, Segments, map_shared, segment_size

_Kind = TypeVar("_Kind", Challenge, Welcome)

NUMBERS = 1 << 31
"""Transfers are numbered modulo this."""


@dataclass(slots=True, eq=False)
class PromptTransfer:
    """A prompt's pages on their way to this engine."""

    seq_id: int
    room: int
    digest: bytes
    skipped_rows: int
    rows: Ids
    """Flat; at most so many arrive."""
    asked_at: float
    began_at: float = 0.0
    num_taken: int = 0
    """Rows that were written."""
    num_bytes: int = 0
    is_over: bool = False
    """Nobody writes to its pages any more, and the loop has been told."""


@dataclass(slots=True, frozen=True)
class Wants:
    """What a decode engine tells every prefill engine."""

    store: PageStore
    identity: Identity
    checksums: bool
    share: bool = True


async def introduce(channel: Channel, wants: Wants, key: bytes) -> Taking:
    """The decode side's part of the greeting: it says nothing of itself before the peer has proved
    that it knows the key. Raises HandoverError with the peer's reason, or with what is wrong with
    the peer."""
    challenge = await _answer(channel, Challenge)
    nonce = new_bytes()
    await channel.send(Hello(nonce, proof(key, "decode", nonce, challenge.nonce), wants.checksums))
    welcome = await _answer(channel, Welcome)
    if not is_proof(welcome.proof, key, "prefill", challenge.nonce, nonce):
        raise HandoverError("the server at the transfer port does not know the key")
    if found := differences(welcome.identity, wants.identity):
        why = f"the servers cannot use each other's keys and values: {'; '.join(found)}"
        with suppress(HandoverError):
            await channel.send(refusal(why))
        raise HandoverError(why)
    why_not, segments = "", None
    size, num = segment_size(wants.store.row_bytes), NUM_SEGMENTS
    if welcome.shared is None or not wants.share:
        why_not = "one of the servers does not share memory"
    else:
        try:
            segments = map_shared(welcome.shared, size, num)
        except HandoverError as error:
            why_not = str(error)
    await channel.send(Begin(segments is not None))
    own = Segments.own(size, num) if segments is None else segments
    return Taking(channel, wants, own, why_tcp=why_not, checksums=welcome.checksums)


async def _answer(channel: Channel, kind: type[_Kind]) -> _Kind:
    found = await channel.receive(MAX_GREETING)
    if isinstance(found, PeerRefusal):
        raise HandoverError(found.reason)
    if not isinstance(found, kind):
        raise HandoverError(f"{type(found).__name__} was not expected")
    return found


class Taking:
    def __init__(
        self,
        channel: Channel,
        wants: Wants,
        segments: Segments,
        *,
        why_tcp: str,
        checksums: bool,
    ) -> None:
        """why_tcp: why memory is not shared; "" if it is."""
        self.channel = channel
        self.why_tcp = why_tcp
        self._wants = wants
        self._segments = segments
        self._checksums = checksums
        self._transfers: dict[int, PromptTransfer] = {}
        self._numbers: dict[int, int] = {}
        """Sequence -> number of its transfer."""
        self._next = 0
        self._queue: asyncio.Queue[Message] = asyncio.Queue()

    @property
    def num_open(self) -> int:
        return len(self._transfers)

    def fetch(self, transfer: PromptTransfer) -> None:
        number, self._next = self._next, (self._next + 1) % NUMBERS
        self._transfers[number] = transfer
        self._numbers[transfer.seq_id] = number
        self._queue.put_nowait(Fetch(number, transfer.room, transfer.digest, transfer.skipped_rows))

    def cancel(self, seq_id: int) -> bool:
        """Write nothing more for a sequence. Returns whether it had a transfer here."""
        number = self._numbers.pop(seq_id, None)
        if number is None:
            return False
        del self._transfers[number]
        self._queue.put_nowait(Cancel(number))
        return True

    async def run(self, finish: Callable[[PromptTransfer, PromptReceived], None]) -> str:
        """Take what comes until the connection ends; returns why. finish: called for each transfer
        that ends here."""
        try:
            return await self.channel.run(self._write(), self._read(finish))
        finally:
            why = f"the connection to the prefill server: {self.channel.failure}"
            for number in list(self._transfers):
                self._end(number, finish, failure=why)

    async def _write(self) -> None:
        while True:
            await self.channel.send(await self._queue.get())

    async def _read(self, finish: Callable[[PromptTransfer, PromptReceived], None]) -> None:
        while True:
            match await self.channel.receive():
                case Chunk() as chunk:
                    await self._take(chunk)
                case End() as end:
                    self._complete(end, finish)
                case Failed(number, reason):
                    if number in self._transfers:
                        self._end(number, finish, failure=reason)
                case Ping():
                    pass
                case other:
                    raise HandoverError(f"{type(other).__name__} was not expected")

    async def _take(self, chunk: Chunk) -> None:
        """Write a chunk to the pages of its transfer, if that has not been cancelled. Raises
        HandoverError for one that does not follow the one before, or is damaged."""
        row_bytes = self._wants.store.row_bytes
        if (
            chunk.segment >= len(self._segments.views)
            or chunk.num_bytes != chunk.num_rows * row_bytes
            or not 0 < chunk.num_bytes <= self._segments.size
        ):
            raise HandoverError("a chunk has an impossible size")
        view = self._segments.views[chunk.segment][: chunk.num_bytes]
        if self.why_tcp:
            await self.channel.receive_into(view)
        transfer = self._transfers.get(chunk.transfer)
        if transfer is not None:
            end, width = chunk.first + chunk.num_rows, self._wants.store.width
            if chunk.first != transfer.num_taken or end * width > len(transfer.rows):
                raise HandoverError("a chunk does not follow the one before it")
            if self._checksums and xxhash.xxh3_64_digest(view) != chunk.checksum:
                raise HandoverError("a chunk's checksum is wrong")
            transfer.began_at = transfer.began_at or asyncio.get_running_loop().time()
            rows = transfer.rows[chunk.first * width : end * width]
            self._wants.store.write_from(rows, view)
            transfer.num_taken = end
            transfer.num_bytes += chunk.num_bytes
        self._queue.put_nowait(Free(chunk.segment))

    def _complete(self, end: End, finish: Callable[[PromptTransfer, PromptReceived], None]) -> None:
        transfer = self._transfers.get(end.transfer)
        if transfer is None:
            return
        if transfer.num_taken != end.num_rows:
            raise HandoverError(
                f"{end.num_rows} page rows were sent, and {transfer.num_taken} have arrived"
            )
        self._queue.put_nowait(Taken(end.transfer))
        self._end(end.transfer, finish, end=end)

    def _end(
        self,
        number: int,
        finish: Callable[[PromptTransfer, PromptReceived], None],
        *,
        end: End | None = None,
        failure: str = "",
    ) -> None:
        transfer = self._transfers.pop(number)
        self._numbers.pop(transfer.seq_id, None)
        finish(transfer, arrived(transfer, end=end, failure=failure))


def arrived(
    transfer: PromptTransfer, *, end: End | None = None, failure: str = ""
) -> PromptReceived:
    """The loop's message about a transfer that ends now."""
    now = asyncio.get_running_loop().time()
    began = transfer.began_at or now
    return PromptReceived(
        transfer.seq_id,
        None if end is None else end.handed,
        transfer.num_taken,
        failure,
        transfer.num_bytes,
        now - began,
        began - transfer.asked_at,
    )
