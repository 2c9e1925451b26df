"""The engine's one stream: everything that enters the loop and everything that leaves it, as typed
records, in the order in which it happened.

Log lines, ``/server_info``, the benchmarks' breakdown and recordings are readers of this stream;
none of them measures anything itself. The inputs (``Turn``, ``Received``, ``ResultTaken``,
``SendFailed``) decide every plan: a scheduler that is given the same inputs again makes the same
plans.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Protocol

import msgspec

from setpoint.core.messages import Finish, OptionChange, ToLoop
from setpoint.core.plan import StepPlan
from setpoint.core.result import EAGER, StepResult
from setpoint.core.settings import Settings


class Refusal(enum.StrEnum):
    """Why a waiting request was not admitted this step."""

    NO_SLOT = "no_slot"  # max_running_requests reached
    NO_MEMORY = "no_memory"  # pages + reserve for running outputs would not fit
    TOKEN_BUDGET = "token_budget"  # max_prefill_tokens of this step spent
    CHUNK_BUDGET = (  # chunked_prefill_size of this step spent, or a chunk already in progress
        "chunk_budget"
    )
    PREFILL_LIMIT = "prefill_limit"  # prefill_max_requests reached
    # admission waits for a larger batch (--enable-prefill-delayer, --min-free-slots-delay)
    DELAYED = "delayed"
    DECODE_TURN = "decode_turn"  # --prefill-decode-interval, --num-continuous-decode-steps
    BLOCKED = "blocked"  # behind a request that was refused: no skipping ahead


class PoolStats(msgspec.Struct, frozen=True):
    """Page-pool state in pool tokens (``core.pagerows``): tokens, where a model has one cache
    group. Invariant: free + evictable + locked + held == total."""

    total: int
    free: int
    evictable: int
    """Cached, not locked by any sequence."""
    locked: int
    """In the tree, on a path that some sequence holds."""
    held: int
    """Owned by sequences outside the tree."""

    @property
    def used(self) -> int:
        """SGLang's "#token": what cannot be had by eviction."""
        return self.total - self.free - self.evictable

    @property
    def usage(self) -> float:
        return self.used / self.total if self.total else 0.0


class Turn(msgspec.Struct, frozen=True, tag=True):
    """Input: a turn of the loop begins that has something to do. What it decides by time, it
    decides by this one reading of the clock."""

    at: float
    """Seconds of the engine's clock."""


class Received(msgspec.Struct, frozen=True, tag=True):
    """Input: a message from the frontend, or that a request is prepared."""

    message: ToLoop


class ResultTaken(msgspec.Struct, frozen=True, tag=True):
    """Input: the executor's answer to a plan, before it is committed."""

    result: StepResult
    at: float
    """Seconds of the engine's clock. No plan depends on it."""


class SendFailed(msgspec.Struct, frozen=True, tag=True):
    """Input: an event of a sequence could not be sent. That ends the sequence; if it was its last,
    the client is answered 500 although its RequestDone says otherwise."""

    seq_id: int
    error: str
    """Name of the exception's type."""


class StepPlanned(msgspec.Struct, frozen=True, tag=True):
    """A plan, before it is executed."""

    plan: StepPlan


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """One executed step, written by the scheduler when its result is committed."""

    step_id: int
    finished_at: float
    """Clock seconds when the result was processed."""
    num_prefill_rows: int
    """Rows that computed prompt tokens (0 = a pure decode step)."""
    num_decode_rows: int
    num_new_tokens: int
    """Prompt tokens computed (not page-rounded)."""
    num_cached_tokens: int
    """Prefix hits of sequences newly admitted in this step."""
    num_new_seqs: int
    num_running: int
    """Running sequences, those of this prefill batch excluded."""
    num_queued: int
    num_preparing: int
    """Requests that wait for their grammar, before the queue."""
    num_pending_tokens: int
    """Sequence lengths waiting, plus the remainder of the sequence in mid-prefill."""
    num_sampled: int
    """Tokens that the step brought for sequences that had not ended before."""
    pool: PoolStats
    new_token_ratio: float
    refusals: Mapping[Refusal, int] = {}
    forward_s: float = 0.0
    sample_s: float = 0.0
    way: str = EAGER
    """As the executor says (``StepResult.way``)."""


class TurnDone(msgspec.Struct, frozen=True, tag=True):
    """Where a turn spent its time, in seconds; written by the loop for every turn that planned a
    step. Waiting for a message is in none of them."""

    step_id: int
    """Of the step that the turn planned."""
    prefill: bool
    """The step computes prompt tokens."""
    turn_s: float
    """All of the turn."""
    plan_s: float
    """Choosing the step's rows."""
    model_s: float
    """In the executor: forward passes and sampling."""
    link_s: float
    """Receiving, decoding, encoding and sending messages."""


class Retraction(msgspec.Struct, frozen=True, tag=True):
    """Sequences went back to the queue because the pool ran dry."""

    num_seqs: int
    num_tokens_gained: int
    ratio_before: float
    ratio_after: float
    testing: bool = False


class Preemption(msgspec.Struct, frozen=True, tag=True):
    """Running requests that went back to the queue so that a more urgent one could be admitted."""

    rid: str
    """The urgent one."""
    preempted: tuple[str, ...]
    num_tokens_gained: int


class PreparationStarted(msgspec.Struct, frozen=True, tag=True):
    """A request waits for something that is made outside the loop; ``Received`` tells when it is
    there."""

    rid: str
    seq_id: int


class GrammarEnded(msgspec.Struct, frozen=True, tag=True):
    """A sequence ends because its grammar admits nothing more. A replay, which has no grammars,
    learns it from here."""

    seq_id: int


class RequestAdmitted(msgspec.Struct, frozen=True, tag=True):
    """A queued request got a slot and its cached prefix."""

    seq_id: int
    rid: str
    num_cached: int
    """Tokens that need not be computed."""
    waited_s: float
    """Since it joined the queue, this time."""
    num_retractions: int
    """0: admitted for the first time."""


class RequestDone(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The life of a request, told once, at its end; whichever way it ended, refusals included.
    Times are seconds of the engine's clock, None for what did not happen."""

    seq_id: int
    rid: str
    finish: Finish
    """Status 503: refused or dropped. Status 500: it failed; the traceback of an exception has been
    logged where it was caught."""
    num_prompt: int
    num_cached: int = 0
    """Prefix hit of the first admission, in tokens."""
    num_outputs: int = 0
    """Tokens that this engine made; prior outputs are not among them."""
    num_retractions: int = 0
    """Preemptions included."""
    accepted_at: float | None = None
    """When it joined the queue, or those that are prepared first. None: it was refused on arrival,
    or nothing was left to do."""
    admitted_at: float | None = None
    """For the first time."""
    first_token_at: float | None = None
    ended_at: float


class RequestClipped(msgspec.Struct, frozen=True, tag=True):
    """A request's max_new_tokens was cut to what context and pool can ever hold."""

    rid: str
    wanted: int
    granted: int


class Fallback(msgspec.Struct, frozen=True, tag=True):
    """Something that was asked for is not done; recorded the first time only."""

    what: str
    why: str


class CacheFlushed(msgspec.Struct, frozen=True, tag=True):
    """A client had the prefix cache emptied, or was refused because requests were open."""

    flushed: bool
    num_tokens: int
    num_queued: int
    num_running: int


class SettingsChanged(msgspec.Struct, frozen=True, tag=True):
    """The steps after this one are planned under other settings (see ``core.messages.Change``)."""

    settings: Settings
    options: tuple[OptionChange, ...]
    by: str
    why: str


class PoolRebuilt(msgspec.Struct, frozen=True, tag=True):
    """An idle engine found its accounting of pages broken and began with an empty pool."""

    violations: tuple[str, ...]


Record = (
    Turn
    | Received
    | ResultTaken
    | SendFailed
    | StepPlanned
    | StepDone
    | TurnDone
    | Retraction
    | Preemption
    | PreparationStarted
    | GrammarEnded
    | RequestAdmitted
    | RequestDone
    | RequestClipped
    | Fallback
    | CacheFlushed
    | SettingsChanged
    | PoolRebuilt
)


class Observer(Protocol):
    """A reader of the stream. Called from the loop, between its decisions: it must be quick, must
    not raise, and must not change what it is given."""

    def on(self, record: Record) -> None: ...
