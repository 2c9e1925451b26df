"""The format of a recording's files. Plain data; ``codec`` makes it from records.

A frame holds a msgpack array of rows, which are arrays that begin with a letter. Arrays of numbers
are little-endian bytes with the element type of the plan. A recording consists of the segments
FILE, FILE.1, FILE.2, …, and each begins with a frame that holds only its Header.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from setpoint.core.errors import RecordingError
from setpoint.core.request import RequestOptions
from setpoint.core.settings import Settings
from setpoint.scheduler.cache.manager import CacheConfig
from setpoint.scheduler.scheduler_config import SchedulerConfig

FORMAT = 2
"""The version of the format. It changes whenever a reader of the previous version would misread a
file."""

HASH_BYTES = 6
"""Size of a hash of ids. A hash only has to distinguish places after the same prefix."""

OFF, ON = "off", "on"
"""Whether content is kept. OFF: ids and names are withheld. ON: everything is kept unchanged."""


@contextmanager
def consistent() -> Iterator[None]:
    """Turn an exception within the block into a RecordingError: a part of the recording contradicts
    another one. A RecordingError is raised unchanged."""
    try:
        yield
    except RecordingError:
        raise
    except Exception as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise RecordingError(f"The recording contradicts itself: {why}.") from error


MAX_PAGES = 1 << 26
"""Most pages of a pool that is recorded; the replay keeps an integer for each."""
MAX_COUNT = 1 << 24
"""Largest value of the other sizes in a header."""
MAX_SECONDS = 2.0**40
"""Largest time in a recording, in seconds."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of the recorded engine, and the facts that a reader needs first."""

    format: int = FORMAT
    version: str
    """Setpoint's version of the recorded engine."""
    recording: str
    """The same random word in every segment of one recording."""
    segment: int = 0
    content: str
    began_at: float
    """Time of the start, in seconds since 1970."""
    clock_at: float
    """The engine's clock at that time, in seconds."""
    scheduler: SchedulerConfig
    settings: Settings
    """The settings at the start."""
    cache: CacheConfig
    device: str
    fields: dict[str, list[str]]
    """Kind of a KeptRecord -> names of its values."""


class KeptTurn(msgspec.Struct, frozen=True, array_like=True, tag="T"):
    at: float


class KeptMessage(msgspec.Struct, frozen=True, array_like=True, tag="M"):
    """A message, unchanged."""

    message: msgspec.Raw


class KeptArrival(msgspec.Struct, frozen=True, array_like=True, tag="A"):
    """A Submit with its content withheld: only what plans depend on (``kept_content.Withheld``)."""

    seq_id: int
    rid: str
    num_prompt: int
    num_prior: int
    hashes: bytes
    """HASH_BYTES for each place (``chain``) in the prompt and the prior outputs."""
    is_valid: bool
    """Whether all ids are in the vocabulary."""
    max_new_tokens: int | None
    ignore_eos: bool
    has_stop: bool
    """Whether the request has stop strings or expressions."""
    stream_interval: int | None
    options: RequestOptions
    """The options with names replaced, and without token ids."""
    seed: int
    was_accepted: bool = False


class KeptResult(msgspec.Struct, frozen=True, array_like=True, tag="R"):
    step_id: int
    at: float
    num_tokens: int
    offsets: bytes
    """``StepResult.offsets``; empty if every row brought back one token."""
    ids: bytes
    """The sampled ids. Empty if content is withheld; the next three fields then replace them."""
    ends: list[int]
    """Indices of tokens that are stop ids of their sequence."""
    invalid: list[int]
    """Indices of tokens that are negative, because the logits were not finite."""
    hashes: bytes
    """HASH_BYTES for each place (``chain``) that the step's tokens reach, in row order."""
    embedded: dict[int, bool]
    """seq_id -> whether its embedding is finite."""
    failures: dict[int, str]
    forward_s: float
    sample_s: float
    way: str


class KeptPlan(msgspec.Struct, frozen=True, array_like=True, tag="P"):
    """A plan without the content of its requests."""

    step_id: int
    rows: dict[str, bytes]
    """Field of ``core.plan.Rows`` -> its array."""
    pages: dict[str, bytes]
    """Field of ``core.plan.PageDeltas`` -> its array."""
    admits: list[list[int]]
    """For each admission: slot, seq_id, number of ids, number of prompt ids, logprob_start, and a
    checksum of the ids (0 if content is withheld)."""
    releases: list[int]


class KeptRecord(msgspec.Struct, frozen=True, array_like=True, tag="O"):
    """Any other record."""

    kind: str
    values: list[Any]


Kept = KeptTurn | KeptMessage | KeptArrival | KeptResult | KeptPlan | KeptRecord
