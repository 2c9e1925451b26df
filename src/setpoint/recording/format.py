"""What a recording holds, as it lies in the file. Plain data; ``codec`` makes it from records.

A frame holds a msgpack array of rows, which are arrays that begin with a letter. Arrays of numbers
are little-endian bytes of the element type that the plan has. A recording is the segments FILE,
FILE.1, FILE.2, …, and each begins with a frame that holds its Header alone.
"""

from __future__ import annotations

from typing import Any

import msgspec

from setpoint.core.errors import SetpointError
from setpoint.core.request import PoolingKind
from setpoint.core.settings import Settings
from setpoint.scheduler.cache.manager import CacheConfig
from setpoint.scheduler.config import SchedulerConfig

FORMAT = 1
"""Changes whenever a reader of the one before would misread the other."""

HASH_BYTES = 6
"""Of a hash of ids. Only places after the same prefix are told apart by it."""

OFF, ON = "off", "on"
"""Content: ids and names are withheld, or as they are."""


class RecordingError(SetpointError):
    """A recording that cannot be written, read or run again."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is built from, and what a reader must know first."""

    format: int = FORMAT
    version: str
    """Setpoint's, of the engine that was recorded."""
    recording: str
    """The same random word in every segment of one recording."""
    segment: int = 0
    content: str
    began_at: float
    """Seconds since 1970 ..."""
    clock_at: float
    """... when the engine's clock showed this."""
    scheduler: SchedulerConfig
    settings: Settings
    """At the start."""
    cache: CacheConfig
    device: str
    fields: dict[str, list[str]]
    """Kind of a KeptRecord -> names of its values."""


class KeptTurn(msgspec.Struct, frozen=True, array_like=True, tag="T"):
    at: float


class KeptMessage(msgspec.Struct, frozen=True, array_like=True, tag="M"):
    """A message as it is."""

    message: msgspec.Raw


class KeptArrival(msgspec.Struct, frozen=True, array_like=True, tag="A"):
    """A Submit with content withheld: what plans depend on (see ``withheld``)."""

    seq_id: int
    rid: str
    num_prompt: int
    num_prior: int
    hashes: bytes
    """HASH_BYTES for each place of the prompt and the prior outputs where a prefix may end."""
    is_valid: bool
    """All ids are in the vocabulary."""
    max_new_tokens: int | None
    ignore_eos: bool
    has_stop: bool
    """It has stop strings."""
    stream_interval: int | None
    stream: bool
    return_logprob: bool
    logprob_start_len: int
    namespace: str
    priority: int | None
    routing_key: str
    pooling: PoolingKind | None
    seed: int


class KeptResult(msgspec.Struct, frozen=True, array_like=True, tag="R"):
    step_id: int
    at: float
    num_tokens: int
    offsets: bytes
    """Empty if every row brought one token."""
    ids: bytes
    """As they were sampled; empty if content is withheld. Then the next three stand for them."""
    ends: list[int]
    """Which of the tokens are stop ids of their sequence."""
    invalid: list[int]
    """Which are negative: the logits were not finite."""
    hashes: bytes
    """HASH_BYTES for each place, in row order, that the step's tokens reach and where a prefix may
    end."""
    embedded: dict[int, bool]
    """seq_id -> whether its embedding is finite."""
    failures: dict[int, str]
    forward_s: float
    sample_s: float
    way: str


class KeptPlan(msgspec.Struct, frozen=True, array_like=True, tag="P"):
    """All of a plan, except what requests say of themselves."""

    step_id: int
    rows: dict[str, bytes]
    """Field of core.plan.Rows -> its array."""
    pages: dict[str, bytes]
    """Field of core.plan.PageDeltas -> its array."""
    admits: list[list[int]]
    """slot, seq_id, number of ids, of them prompt, logprob_start, and a checksum of the ids (0 if
    content is withheld)."""
    releases: list[int]


class KeptRecord(msgspec.Struct, frozen=True, array_like=True, tag="O"):
    """Any other record."""

    kind: str
    values: list[Any]


Kept = KeptTurn | KeptMessage | KeptArrival | KeptResult | KeptPlan | KeptRecord
