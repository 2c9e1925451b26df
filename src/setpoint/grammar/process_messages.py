"""The messages between the engine and the processes that run a grammar library: msgpack, each
message after its length.
"""

from __future__ import annotations

import msgspec

from setpoint.core.constraint import ConstraintKind
from setpoint.core.framing import framed


class Compile(msgspec.Struct, frozen=True, tag=True):
    """Gives a new process the constraint that it compiles and applies."""

    kind: ConstraintKind
    text: str


class Advance(msgspec.Struct, frozen=True, tag=True):
    """Gives a process the next tokens of a sequence. A new number begins a sequence."""

    number: int
    tokens: list[int]


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Tells a process that a sequence has ended."""

    number: int


class Started(msgspec.Struct, frozen=True, tag=True):
    """The first message of a process."""

    pid: int


class Compiled(msgspec.Struct, frozen=True, tag=True):
    """The answer to Compile."""

    num_bytes: int
    """Memory of the compiled constraint."""
    refusal: str = ""
    """Why the constraint cannot be compiled; empty if it is."""


class MatcherState(msgspec.Struct, frozen=True, tag=True):
    """The answer to Advance: where the sequence is now."""

    number: int
    terminated: bool
    mask: bytes
    """The bits of the tokens that may come next, int32 [ceil(vocab / 32)]."""
    seconds: float
    """Computing time of this answer."""
    error: str = ""
    """Why there is no answer: a token was not allowed."""


ToProcess = Compile | Advance | Forget
FromProcess = Started | Compiled | MatcherState

to_process = msgspec.msgpack.Decoder(ToProcess)
from_process = msgspec.msgpack.Decoder(FromProcess)
_encoder = msgspec.msgpack.Encoder()


def pack(message: ToProcess | FromProcess) -> bytes:
    """The bytes of a message, after its length."""
    return framed(_encoder.encode(message))
