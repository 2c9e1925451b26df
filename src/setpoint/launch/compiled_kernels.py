"""What the process that compiles kernels ahead (``launch.child.kernel_compiler``) tells the one
that started it: a JSON line for each message."""

from __future__ import annotations

import msgspec


class Compiled(msgspec.Struct, frozen=True, tag=True):
    """One variant of a kernel is in the folder."""

    kernel: str
    seconds: float
    """How long compiling it took, or reading it."""
    is_known: bool
    """Whether it was there before."""


class Finished(msgspec.Struct, frozen=True, tag=True):
    """All variants are in the folder."""

    folder: str
    triton: str
    """Version of Triton that compiled them."""
    python: str
    """Tag of its wheel's Python, such as cp312."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Nothing more is compiled."""

    text: str
    by_options: bool
    """Whether the options cannot be honoured."""


Message = Compiled | Finished | Refused


def encode_message(message: Message) -> str:
    return msgspec.json.encode(message).decode()


def decode_message(line: bytes) -> Message:
    """The message in a line. Raises msgspec.DecodeError."""
    message: Message = msgspec.json.decode(line, type=Message)
    return message
