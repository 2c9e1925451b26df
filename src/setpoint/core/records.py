"""The engine's event stream: everything that enters or leaves the loop, as typed records, in the
order in which it happened.

Log lines, ``/server_info``, the benchmarks' breakdown and recordings are readers of this stream;
none of them measures anything itself. The inputs (``Turn``, ``Received``, ``ResultTaken``,
``StepLost``, ``SendFailed``) determine every plan: a scheduler that gets the same inputs again
makes the same plans.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Literal, Protocol

import msgspec

from setpoint.core.constraint import ConstraintKind
from setpoint.core.control import OptionChange, PauseMode
from setpoint.core.handover import HandoverCounts
from setpoint.core.lack import Lack
from setpoint.core.messages import Finish, ToLoop
from setpoint.core.operations import MemoryPart
from setpoint.core.plan import StepPlan
from setpoint.core.pool import PoolStats
from setpoint.core.preparation import Need
from setpoint.core.result import EAGER, StepResult
from setpoint.core.settings import Settings
from setpoint.core.transfers import Direction, KVLocation


class AdmissionRefusal(enum.StrEnum):
    """Why a waiting request was not admitted in this step."""

    NO_SLOT = "no_slot"  # max_running_requests was reached
    NO_MEMORY = "no_memory"  # its pages and the reserve for running outputs would not fit
    TOKEN_BUDGET = "token_budget"  # max_prefill_tokens of this step were used up
    CHUNK_BUDGET = (  # chunked_prefill_size was used up, or a chunk is in progress
        "chunk_budget"
    )
    PREFILL_LIMIT = "prefill_limit"  # prefill_max_requests was reached
    # admission waits for a larger batch (--enable-prefill-delayer, --min-free-slots-delay)
    DELAYED = "delayed"
    # a decode step goes first (--prefill-decode-interval, --num-continuous-decode-steps)
    DECODE_TURN = "decode_turn"
    BLOCKED = "blocked"  # it is behind a request that was refused: no skipping ahead


class Turn(msgspec.Struct, frozen=True, tag=True):
    """Input: a turn of the loop begins and has something to do. All its decisions about time use
    this one reading of the clock."""

    at: float
    """Seconds of the engine's clock."""


class Received(msgspec.Struct, frozen=True, tag=True):
    """Input: a message from the frontend, or the notice that a request is prepared."""

    message: ToLoop


class ResultTaken(msgspec.Struct, frozen=True, tag=True):
    """Input: the executor's result of a plan, before it is committed."""

    result: StepResult
    at: float
    """Seconds of the engine's clock. No plan depends on it."""


class SendFailed(msgspec.Struct, frozen=True, tag=True):
    """Input: an event of a sequence could not be sent, which ends the sequence. If it was the
    sequence's last event, the client is answered with status 500 although RequestDone says
    otherwise."""

    seq_id: int
    error: str
    """Name of the exception's type."""


class StepPlanned(msgspec.Struct, frozen=True, tag=True):
    """A plan, before it is executed."""

    plan: StepPlan


class StepLost(msgspec.Struct, frozen=True, tag=True):
    """Input: the device had too little memory for a step (``StepOutOfMemoryError``). Its sequences
    and all others that ran go back to the queue, unless the engine ends."""

    step_id: int
    sampling: bool
    """Whether it was lost while its rows were sampled, and not before."""
    num_seqs: int
    """Sequences that ran."""
    lack: Lack
    is_final: bool
    """See ``StepOutOfMemoryError``."""


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """One executed step, written by the scheduler when its result is committed."""

    step_id: int
    finished_at: float
    """Clock seconds when the result was processed."""
    num_prefill_rows: int
    """Rows that computed prompt tokens; 0 for a pure decode step."""
    num_decode_rows: int
    num_new_tokens: int
    """Prompt tokens computed, not rounded to pages."""
    num_cached_tokens: int
    """Prompt tokens of newly admitted sequences that the prefix cache supplied."""
    num_new_seqs: int
    num_running: int
    """Running sequences, without those of this step's prefill rows."""
    num_queued: int
    num_preparing: int
    """Requests that wait for their grammar and have not joined the queue yet."""
    num_pending_tokens: int
    """Sum of the lengths of waiting sequences, plus the remainder of a prompt that is partly
    computed."""
    num_sampled: int
    """Sampled and forced tokens of sequences that had not ended before."""
    pool: PoolStats
    new_token_ratio: float
    refusals: Mapping[AdmissionRefusal, int] = {}
    forward_s: float = 0.0
    sample_s: float = 0.0
    way: str = EAGER
    """How the executor ran the step (``StepResult.way``)."""
    num_forced: int = 0
    """Forced tokens of the step's rows, which were not sampled."""
    num_pairs: int = 0
    """Pairs of a computed token and a token up to it, itself included, over all rows: the work of
    attention. What a window hides is counted, too."""
    num_behind: int = 0
    """Tokens before the first computed one, over all rows: their keys and values are read."""
    handover: HandoverCounts | None = None
    """Set on prefill and decode servers."""


class HandedOver(msgspec.Struct, frozen=True, tag=True):
    """The prompt of a request has moved from the prefill to the decode server, or has not: then the
    decode server computes it. Both write this record."""

    rid: str
    seq_id: int
    why: str
    """Why it has not; empty if it has."""
    num_bytes: int
    seconds: float
    """The time from the first page to the last."""
    waited_s: float
    """The time from the question to the first page, on the decode server."""
    room_s: float = 0.0
    """How long the request waited for room in the pool of the decode server."""


class TurnDone(msgspec.Struct, frozen=True, tag=True):
    """How a turn spent its time, in seconds. The loop writes one for every turn that planned a
    step. None of the times includes waiting for a message."""

    step_id: int
    """The step that the turn planned."""
    prefill: bool
    """True if the step computes prompt tokens."""
    turn_s: float
    """The whole turn."""
    plan_s: float
    """Time for choosing the step's rows."""
    model_s: float
    """Time in the executor: forward passes and sampling."""
    link_s: float
    """Time for receiving, decoding, encoding and sending messages."""
    cpu_s: float | None = None
    """How long the loop's thread had a CPU in the turn, on whose CPU the step is computed, too; the
    rest of ``turn_s`` it waited, mostly for a CPU that other programs had. None: a step runs
    elsewhere, or the source does not say."""


class Retraction(msgspec.Struct, frozen=True, tag=True):
    """Sequences went back to the queue because the pool ran out of pages."""

    num_seqs: int
    num_tokens_gained: int
    ratio_before: float
    ratio_after: float
    testing: bool = False
    num_input_tokens: int = 0
    """Prompt tokens of these sequences."""
    num_output_tokens: int = 0
    """Their outputs so far, which they keep."""


class Preemption(msgspec.Struct, frozen=True, tag=True):
    """Running requests went back to the queue so that a more urgent one could be admitted."""

    rid: str
    """The more urgent request."""
    preempted: tuple[str, ...]
    num_tokens_gained: int


class PreparationStarted(msgspec.Struct, frozen=True, tag=True):
    """A request waits for something that is prepared outside the loop. A later ``Received`` says
    that it is ready."""

    rid: str
    seq_id: int
    need: Need = Need.GRAMMAR


Outcome = Literal[
    "compiled", "cached", "resumed", "refused", "timed_out", "aborted", "loaded", "missed"
]
"""How a preparation ended. compiled and cached: its grammar is made. resumed: it is ready again,
after a GrammarLate. loaded: keys and values are in the pool. missed: there was nothing to load, or
nothing that pays; it is computed instead. refused: what it needs could not be made. timed_out: it
was not ready in time. aborted: nobody waits for it any more."""


class PreparationEnded(msgspec.Struct, frozen=True, tag=True):
    """A wait that began with PreparationStarted or GrammarLate has ended."""

    rid: str
    seq_id: int
    kind: ConstraintKind | None
    """The request's constraint."""
    outcome: Outcome
    seconds: float
    """How long the work took, without waiting for a thread; 0 if it was not finished."""
    need: Need = Need.GRAMMAR


class TransferStarted(msgspec.Struct, frozen=True, tag=True):
    """Pages of keys and values begin to move (``core.transfers``). They are held until
    TransferEnded."""

    id: int
    direction: Direction
    place: KVLocation
    start: int
    """Position of the first token."""
    num_tokens: int
    num_pages: int


class TransferEnded(msgspec.Struct, frozen=True, tag=True):
    """The pages of a transfer are not held by it any more."""

    id: int
    direction: Direction
    place: KVLocation
    num_tokens: int
    """Number of tokens that were moved."""
    num_missing: int
    """Number of tokens that should have been moved and were not."""
    num_bytes: int
    seconds: float
    why: str
    """Why some are missing; empty if none are."""


class GrammarEnded(msgspec.Struct, frozen=True, tag=True):
    """A sequence ends because its grammar allows no further token, or has raised an exception. A
    replay has no grammars and reads this record instead."""

    seq_id: int
    finish: Finish
    discards: bool
    """Whether the token that the step sampled is discarded, because the grammar ended before it."""


class GrammarLate(msgspec.Struct, frozen=True, tag=True):
    """A sequence's grammar takes longer than the loop waits. The sequence leaves the batch: the
    results of its rows in flight are discarded, and it waits for its grammar as a new request does,
    until PreparationEnded. A replay has no grammars and reads this record instead."""

    rid: str
    seq_id: int
    discards: bool
    """Whether the step in flight had no mask for it, so that the token of this step is discarded,
    too."""


class TokensForced(msgspec.Struct, frozen=True, tag=True):
    """A sequence's grammar forces the next tokens, which its next rows compute. A replay has no
    grammars and reads this record instead."""

    seq_id: int
    num_tokens: int


class RequestAdmitted(msgspec.Struct, frozen=True, tag=True):
    """A queued request got a slot and its cached prefix."""

    seq_id: int
    rid: str
    num_cached: int
    """Tokens that the prefix cache supplied, so that they need not be computed."""
    waited_s: float
    """Seconds since it last joined the queue."""
    num_retractions: int
    """Number of retractions before this admission; 0 at the first one."""


class RequestDone(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The whole life of a request in one record, written when the request ends. Every request has
    one, refused ones included. Times are seconds of the engine's clock; None if the event did not
    happen."""

    seq_id: int
    rid: str
    finish: Finish
    """How it ended. Status 503: it was refused or dropped. Status 500: it failed; the traceback of
    an exception has been logged where it was caught."""
    num_prompt: int
    num_cached: int = 0
    """Prompt tokens that the prefix cache supplied at the first admission."""
    num_outputs: int = 0
    """Number of tokens that this engine made, without prior outputs."""
    num_retractions: int = 0
    """Number of retractions, including preemptions."""
    accepted_at: float | None = None
    """When the request joined the queue or, if it had to be prepared, when that began. None: it was
    refused on arrival, or had nothing left to do."""
    admitted_at: float | None = None
    """When it was admitted for the first time."""
    first_token_at: float | None = None
    ended_at: float


class RequestClipped(msgspec.Struct, frozen=True, tag=True):
    """A request's max_new_tokens was reduced to what the context and the pool can hold."""

    rid: str
    wanted: int
    granted: int


class Fallback(msgspec.Struct, frozen=True, tag=True):
    """Something that was asked for is not done. Recorded the first time only."""

    what: str
    why: str


class CacheFlushed(msgspec.Struct, frozen=True, tag=True):
    """A client asked to empty the prefix cache. It was refused if requests were open."""

    flushed: bool
    num_tokens: int
    num_queued: int
    num_running: int


class SettingsChanged(msgspec.Struct, frozen=True, tag=True):
    """The steps after this record are planned under other settings (see
    ``core.control.Change``)."""

    settings: Settings
    options: tuple[OptionChange, ...]
    by: str
    why: str


class Paused(msgspec.Struct, frozen=True, tag=True):
    """No step is planned from now on, until Continued."""

    mode: PauseMode
    num_aborted: int
    """Requests that the pause ended."""
    num_retracted: int
    """Running requests that the pause sent back to the queue."""
    num_queued: int
    """Requests that wait afterwards, including those in preparation."""
    num_running: int
    """Requests that keep their memory."""
    is_hold: bool = False
    """Whether it is for an order to all engines, and no operator has asked for it."""


class Continued(msgspec.Struct, frozen=True, tag=True):
    """Steps are planned again."""

    paused_s: float
    """How long the pause lasted. It does not count towards the time limits of requests."""
    num_queued: int
    num_running: int
    was_hold: bool = False


class Operated(msgspec.Struct, frozen=True, tag=True):
    """An operation was carried out or refused. A replay has no engine and reads the outcome from
    this record."""

    id: int
    """Id of the ``Operate`` call."""
    what: str
    """Name of the operation's type, or of the part of a record of experts (RECORDING)."""
    parts: tuple[MemoryPart, ...]
    """The parts of memory that are released after it."""
    error: str
    """Why nothing was done; empty if it was."""


class Rested(msgspec.Struct, frozen=True, tag=True):
    """The engine has become idle: no request runs or waits."""

    pool: PoolStats
    """It may differ from the latest StepDone's: a client that goes away frees its pages without a
    step."""


class PoolRebuilt(msgspec.Struct, frozen=True, tag=True):
    """An idle engine found its page accounting inconsistent and started again with an empty
    pool."""

    violations: tuple[str, ...]


Record = (
    Turn
    | Received
    | ResultTaken
    | SendFailed
    | StepPlanned
    | StepLost
    | StepDone
    | TurnDone
    | Retraction
    | Preemption
    | PreparationStarted
    | PreparationEnded
    | TransferStarted
    | TransferEnded
    | HandedOver
    | GrammarEnded
    | GrammarLate
    | TokensForced
    | RequestAdmitted
    | RequestDone
    | RequestClipped
    | Fallback
    | CacheFlushed
    | SettingsChanged
    | Paused
    | Continued
    | Operated
    | Rested
    | PoolRebuilt
)


class Observer(Protocol):
    """A reader of the stream. The loop calls it between its decisions, so it must be quick, must
    not raise, and must not change the records."""

    def on(self, record: Record) -> None: ...
