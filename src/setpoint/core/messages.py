"""What crosses the process border between frontend and engine: msgspec structs, tagged, never
pickle.

Frontend -> engine: ToEngine. Engine -> frontend: ToFrontend. Encode and decode with :data:`encode`,
:func:`decode_to_engine` and :func:`decode_to_frontend`.

A sequence goes by the number that the frontend gave it when it submitted it. A rid will not do:
clients choose it, and may use it again while events of its last use are still on the way.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from setpoint.core.request import Request
from setpoint.core.settings import Settings


class Finish(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a sequence ended (SGLang's ``finish_reason``)."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    """stop: the token id, or the string that the frontend found."""
    length: int | None = None
    message: str | None = None
    status_code: int | None = None
    err_type: str | None = None


class LogprobBlock(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs of consecutive positions, as plain lists (see core.result.PositionLogprobs)."""

    values: list[float]
    ids: list[int]
    top_values: list[list[float]]
    top_ids: list[list[int]]
    picked: list[list[float]]


class TokenEvent(msgspec.Struct, frozen=True, array_like=True):
    """New outputs of one sequence, or its end. The counts are cumulative and final when ``finish``
    is set."""

    seq_id: int
    ids: list[int]
    finish: Finish | None = None
    num_prompt: int = 0
    num_outputs: int = 0
    """Outputs so far, prior outputs included."""
    num_cached: int = 0
    num_retractions: int = 0
    output_logprobs: LogprobBlock | None = None
    prompt_logprobs: LogprobBlock | None = None
    """Sent once, with the first output."""
    embedding: bytes = b""
    """Of a pooled request, with its end: [hidden size] little-endian float32, not normalised."""


class Submit(msgspec.Struct, frozen=True, tag=True):
    seq_id: int
    """Never used before on this link; larger than all before it."""
    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End these sequences, as far as they still run; each is answered by a last event."""

    seq_ids: list[int]


class Stop(msgspec.Struct, frozen=True, tag=True):
    """The frontend is done with this sequence (stop string found, or the client went away); no
    event is wanted back."""

    seq_id: int


class Call(msgspec.Struct, frozen=True, tag=True):
    """A control call that is answered by one Reply with the same id. names: "flush_cache",
    "state"."""

    id: int
    name: str


class Prepared(msgspec.Struct, frozen=True, tag=True):
    """What a sequence waited for is there, or cannot be had. From inside the engine's process: the
    frontend cannot send it."""

    seq_id: int
    finish: Finish | None = None
    """How the request ends, if it could not be prepared."""


class OptionChange(msgspec.Struct, frozen=True):
    """An option's value before and after, as the user knows it."""

    option: str
    old: str | int | float | bool | None
    new: str | int | float | bool | None

    def __str__(self) -> str:
        return f"{self.option} {self.old} -> {self.new}"


class Change(msgspec.Struct, frozen=True, tag=True):
    """Serve under these settings from the next step on; answered by one Reply with the same id.
    Checked by the frontend."""

    id: int
    settings: Settings
    """All of them, as they are to be."""
    options: list[OptionChange]
    """What differs."""
    by: str
    """Who asked for it."""
    why: str
    """In the words of whoever asked; may be empty."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Finish nothing more, release, exit 0."""


class Tokens(msgspec.Struct, frozen=True, tag=True):
    events: list[TokenEvent]


class Reply(msgspec.Struct, frozen=True, tag=True):
    id: int
    ok: bool
    value: dict[str, Any] = {}


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Sent once when the engine can take requests."""

    info: dict[str, Any]
    """max_total_num_tokens, max_running_requests, max_req_input_len, phases, …"""


class Starting(msgspec.Struct, frozen=True, tag=True):
    """What the engine does before it is ready, for whoever waits."""

    doing: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start; ``message`` is the one line for the user."""

    message: str


class Announce(msgspec.Struct, frozen=True, tag=True):
    """How the set of sequences changes that the plans in flight name; sent before the newest of
    them executes, so that after a crash the suspects are known.

    A sequence leaves when no plan in flight names it any more: it has finished, was retracted or
    preempted, or the newer plans leave it out.
    """

    joined: dict[int, str]
    """Sequence number -> rid: the frontend may have forgotten a sequence that it has just
    stopped."""
    left: list[int]


ToEngine = Submit | Abort | Stop | Call | Change | Shutdown
ToLoop = ToEngine | Prepared
"""What the engine's loop finds in its inbox."""
ToFrontend = Tokens | Reply | Starting | Ready | Failed | Announce

_encoder = msgspec.msgpack.Encoder()
_to_loop: msgspec.msgpack.Decoder[ToLoop] = msgspec.msgpack.Decoder(ToLoop)
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_to_frontend: msgspec.msgpack.Decoder[ToFrontend] = msgspec.msgpack.Decoder(ToFrontend)


def encode(message: ToLoop | ToFrontend) -> bytes:
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    """Raises msgspec.DecodeError for bytes that are not one of ToEngine."""
    return _to_engine.decode(data)


def decode_to_loop(data: bytes) -> ToLoop:
    """Of a recording, which has what came from inside the engine's process, too."""
    return _to_loop.decode(data)


def decode_to_frontend(data: bytes) -> ToFrontend:
    return _to_frontend.decode(data)
