"""Frames on a transfer connection: a header of fixed size, a MessagePack message, and for a chunk
over TCP the bytes of its page rows. Sizes are checked before anything is read into memory."""

from __future__ import annotations

import os
import struct
from typing import Annotated

import msgspec
from msgspec import Meta

from setpoint.core.bootstrap import BootstrapRoom
from setpoint.core.handover import HandoverState
from setpoint.core.handshake import SIZE
from setpoint.handover.identity import Identity

MAGIC = b"SPHO"
VERSION = 3
HEADER = struct.Struct("<4sHHI")
"""Magic, version of the protocol, zero, bytes of the message."""
MAX_GREETING = 64 << 10
"""Largest message before the peer has proved that it may connect."""
MAX_MESSAGE = 4 << 20
"""Largest message afterwards: a first token with the logprobs of its alternatives."""
MAX_WORD = 4096
"""Most characters of a reason."""

Secret = Annotated[bytes, Meta(min_length=SIZE, max_length=SIZE)]
Word = Annotated[str, Meta(max_length=MAX_WORD)]
Index = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]


class HandoverError(Exception):
    """A transfer or a connection has failed; the text says why."""


def in_words(error: Exception, otherwise: str) -> str:
    """What an error of a connection says, without its number; ``otherwise`` of one that says
    nothing, as a TimeoutError."""
    number = error.errno if isinstance(error, OSError) else None
    if number is not None and number > 0:
        return os.strerror(number)  # the error's own words name the address once more
    return getattr(error, "strerror", None) or str(error) or otherwise


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """What both sides can send."""


class Challenge(_Message, frozen=True):
    """The prefill side begins."""

    nonce: Secret


class Hello(_Message, frozen=True):
    """The decode side proves that it knows the key of the transfer."""

    nonce: Secret
    proof: Secret
    checksums: bool
    """Whether it wants chunks to have checksums."""


class SharedSegments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the prefill side's segments can be found on this machine."""

    machine: Word
    pid: Index
    descriptor: Index
    mark: Secret
    """The first bytes of the memory, so that it is not that of another process."""


class Welcome(_Message, frozen=True):
    """The prefill side proves the same, and says what its keys and values are like."""

    proof: Secret
    identity: Identity
    shared: SharedSegments | None
    checksums: bool


class PeerRefusal(_Message, frozen=True, tag="Refusal"):
    """The connection ends. Made by ``refusal``."""

    reason: Word


class Begin(_Message, frozen=True):
    """Requests follow."""

    is_shared: bool
    """Whether the decode side has mapped the segments, so that chunks need not follow their
    headers."""


class Fetch(_Message, frozen=True):
    """The decode side has pages for a bootstrap room's prompt."""

    transfer: Index
    """Names this transfer on this connection."""
    room: BootstrapRoom
    digest: Secret
    """Digest of the prompt's ids."""
    skipped_rows: Index
    """Page rows at the beginning that it has already."""


class Cancel(_Message, frozen=True):
    transfer: Index


class Chunk(_Message, frozen=True):
    """Page rows of a transfer are in a segment, or follow."""

    transfer: Index
    segment: Index
    first: Index
    """Position of the first row among the transfer's rows."""
    num_rows: Index
    num_bytes: Index
    checksum: Annotated[bytes, Meta(max_length=8)]
    """xxh3 of the bytes; empty without checksums."""


class Free(_Message, frozen=True):
    """The decode side has taken a chunk out of its segment."""

    segment: Index


class End(_Message, frozen=True):
    """All chunks of a transfer have been sent."""

    transfer: Index
    num_rows: Index
    handed: HandoverState


class Taken(_Message, frozen=True):
    """The decode side has everything of a transfer."""

    transfer: Index


class Failed(_Message, frozen=True):
    """A transfer ends without success."""

    transfer: Index
    reason: Word


class Ping(_Message, frozen=True):
    """The sender is alive."""


Message = (
    Challenge
    | Hello
    | Welcome
    | PeerRefusal
    | Begin
    | Fetch
    | Cancel
    | Chunk
    | Free
    | End
    | Taken
    | Failed
    | Ping
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def shortened(reason: str) -> str:
    """A reason as the other side can read it: its end is left out if it is too long."""
    return reason if len(reason) <= MAX_WORD else reason[: MAX_WORD - 1] + "…"


def refusal(reason: str) -> PeerRefusal:
    return PeerRefusal(shortened(reason))


def encode(message: Message) -> bytes:
    """The header and the message."""
    data = _encoder.encode(message)
    return HEADER.pack(MAGIC, VERSION, 0, len(data)) + data


def size_of(header: bytes, most: int) -> int:
    """Bytes of the message after this header. Raises HandoverError if it is none, is of another
    version, or announces more than ``most``."""
    magic, version, zero, size = HEADER.unpack(header)
    if magic != MAGIC or zero:
        raise HandoverError("these bytes are not of Setpoint's transfer protocol")
    if version != VERSION:
        raise HandoverError(f"protocol version {VERSION} here, {version} there")
    if size > most:
        raise HandoverError(f"a message of {size} bytes, where at most {most} are allowed")
    return int(size)


def decode(data: bytes | bytearray) -> Message:
    """Raises HandoverError for bytes that are no message."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HandoverError(f"a malformed message: {error}") from None
