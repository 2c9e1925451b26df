"""The messages between the frontend's and the engine's processes: tagged msgspec structs, never
pickle.

Frontend -> engine: ToEngine. Engine -> frontend: ToFrontend. Control calls and their answers are in
``core.control``. Encode and decode with :data:`encode`,
:func:`decode_to_engine` and :func:`decode_to_frontend`.

A sequence is identified by the number that the frontend gave it when it submitted it. A rid cannot
identify it: clients choose rids, and may use one again while events of its earlier use are still on
the way.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from setpoint.core.control import Answer, Call, EngineFacts
from setpoint.core.handover import PromptNews
from setpoint.core.logprobs import LogprobBlock
from setpoint.core.request import Request


class Finish(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a sequence ended (SGLang's ``finish_reason``)."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    """The token id or the string that ended the sequence, if the type is "stop"; the frontend finds
    the strings."""
    length: int | None = None
    message: str | None = None
    status_code: int | None = None
    err_type: str | None = None

    @property
    def how(self) -> str:
        """The type, or the HTTP status of a request that was refused or failed."""
        return self.type if self.status_code is None else str(self.status_code)


class Timing(msgspec.Struct, frozen=True, array_like=True):
    """Where the engine's part of the time to the first token went, in seconds."""

    waiting_s: float
    """The time from acceptance to the first admission: preparation and the queue."""
    prefill_s: float
    """The time from the first admission to the first token or, for a request without outputs, to
    its end."""


class TokenEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New outputs of one sequence, or its end. The counts are cumulative; they are final when
    ``finish`` is set."""

    seq_id: int
    ids: list[int]
    finish: Finish | None = None
    num_prompt: int = 0
    num_outputs: int = 0
    """Number of outputs so far, including prior outputs."""
    num_cached: int = 0
    num_retractions: int = 0
    output_logprobs: LogprobBlock | None = None
    prompt_logprobs: LogprobBlock | None = None
    """Sent once, with the first output."""
    embedding: bytes = b""
    """The embedding of a pooled request, sent with its end: [hidden size] little-endian float32,
    not normalised."""
    token_facts: dict[str, list[bytes]] = {}
    """Name -> the numbers about each of ``ids``, little-endian int32 (see
    ``RequestOptions.token_facts``)."""
    timing: Timing | None = None
    """Sent once, with the first output or, if there is none, with the end; None for a request that
    was never admitted."""
    num_loaded: int = 0
    """How many of the cached tokens had been loaded for it from cache tiers; of these,
    ``num_from_host`` from host memory."""
    num_from_host: int = 0
    hidden_states: bytes = b""
    """New hidden states, if asked for: [positions, hidden size] little-endian float32. With
    ``hidden_states`` all events together have one for each token of the prompt and for each output
    except the last; with ``output_hidden_states`` an event has one for each of its ids."""


class Submit(msgspec.Struct, frozen=True, tag=True):
    seq_id: int
    """A number never used before on this link, and larger than all before it."""
    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End these sequences if they still run; a last event answers each of them."""

    seq_ids: list[int]
    message: str = ""
    """The reason that their clients are given; "" for the usual one."""
    err_type: str | None = None


class Stop(msgspec.Struct, frozen=True, tag=True):
    """The frontend needs nothing more of this sequence (it found a stop string, or the client went
    away); the engine sends no event back."""

    seq_id: int


class Prepared(msgspec.Struct, frozen=True, tag=True):
    """What a sequence waited for is ready, or cannot be prepared. It comes from inside the engine's
    process; the frontend cannot send it."""

    seq_id: int
    finish: Finish | None = None
    """How the request ends if it could not be prepared."""
    seconds: float = 0.0
    """How long the work took, without waiting for a thread."""
    is_cached: bool = False
    """Whether the result was already there from an earlier request."""


# The next two have the tags that they have in recordings.
class PrefixFound(msgspec.Struct, frozen=True, tag="Found"):
    """How much of a prompt stores have (``core.transfers``). Like ``Prepared`` it comes from inside
    the engine's process, as does ``PagesMoved``."""

    seq_id: int
    num_tokens: int
    """Number of tokens from the beginning of the prompt."""
    seconds: float = 0.0
    """How long it took to find that out."""


class PagesMoved(msgspec.Struct, frozen=True, tag="Moved"):
    """A transfer has ended."""

    id: int
    num_tokens: int
    """Number of tokens, from the transfer's first one on, that were moved and are sound. With
    several ranks, the smallest number of any of them."""
    num_bytes: int = 0
    """Bytes that were read or written for it, of all ranks."""
    seconds: float = 0.0
    """How long the work took, without waiting for a thread."""
    why: str = ""
    """Why it ended early; empty if it did not."""
    from_host: int = 0
    """How many of the tokens came from memory of this machine."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Do not finish the running sequences; release everything and exit with code 0."""


class Tokens(msgspec.Struct, frozen=True, tag=True):
    events: list[TokenEvent]


class Reply(msgspec.Struct, frozen=True, tag=True):
    """The answer to the control call with this id."""

    id: int
    answer: Answer


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Sent once when the engine can take requests."""

    facts: EngineFacts


class Starting(msgspec.Struct, frozen=True, tag=True):
    """What the engine is doing before it is ready."""

    doing: str


class Alive(msgspec.Struct, frozen=True, tag=True):
    """The engine's loop is running. Sent at intervals, so that a loop that hangs is noticed."""

    stands_still: bool = False
    """Whether it plans no steps: it is paused, or memory is released."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start; ``message`` is a one-line explanation for the user."""

    message: str
    is_final: bool = False
    """Whether the next engine would fail for the same reason: the model's files or the options."""


class Cached(msgspec.Struct, frozen=True, tag=True):
    """How the engine's prefix cache has changed since the last such message. Only an engine among
    several sends it."""

    stored: bytes
    """Names of prefixes that are cached now (``core.prefix_digest``), each of NAME_BYTES."""
    removed: bytes
    """Names of prefixes that are cached no longer."""
    is_cleared: bool = False
    """Whether everything before was removed."""


class Blocks(msgspec.Struct, frozen=True, tag=True):
    """How the engine's prefix cache has changed, for programs outside. Only an engine whose KV
    cache events are published sends it."""

    events: bytes
    """A msgpack array of events (``core.kv_events``). The frontend passes it on unread."""


class Announce(msgspec.Struct, frozen=True, tag=True):
    """The change in the set of sequences that the plans in flight contain. It is sent before the
    newest of these plans executes, so that after a crash the suspects are known.

    A sequence leaves when no plan in flight contains it any more: it has finished, was retracted or
    preempted, or the newer plans leave it out.
    """

    joined: dict[int, str]
    """Sequence number -> rid. The rid is repeated here because the frontend may already have
    forgotten a sequence that it has just stopped."""
    left: list[int]


ToEngine = Submit | Abort | Stop | Shutdown | Call
Posted = Prepared | PrefixFound | PagesMoved | PromptNews
"""The messages that come from threads of the engine's own process."""
ToLoop = ToEngine | Posted
"""The messages that the engine's loop can find in its inbox."""
ToFrontend = Tokens | Reply | Starting | Ready | Alive | Failed | Announce | Cached | Blocks

_encoder = msgspec.msgpack.Encoder()
_to_loop: msgspec.msgpack.Decoder[ToLoop] = msgspec.msgpack.Decoder(ToLoop)
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_to_frontend: msgspec.msgpack.Decoder[ToFrontend] = msgspec.msgpack.Decoder(ToFrontend)


def encode(message: ToLoop | ToFrontend) -> bytes:
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    """Decode a message from the frontend. Raises msgspec.DecodeError for bytes that are not one of
    ToEngine."""
    return _to_engine.decode(data)


def decode_to_loop(data: bytes) -> ToLoop:
    """Decode a recorded message, which may also have come from inside the engine's process."""
    return _to_loop.decode(data)


def decode_to_frontend(data: bytes) -> ToFrontend:
    return _to_frontend.decode(data)
