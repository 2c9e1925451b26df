"""Records of what happened: one per step, one per finished request, one reason per refusal.

Together they are the only source of log lines, metrics, the console, the doctor and the
controllers.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from setpoint.core.result import EAGER


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


@dataclass(slots=True, frozen=True)
class Retraction:
    """One retraction event: sequences sent back to the queue because the pool ran dry."""

    num_seqs: int
    num_tokens_gained: int
    ratio_before: float
    ratio_after: float
    testing: bool = False


@dataclass(slots=True, frozen=True)
class Preemption:
    """Running requests that went back to the queue so that a more urgent one could be admitted."""

    rid: str
    """The urgent one."""
    preempted: tuple[str, ...]
    num_tokens_gained: int


@dataclass(slots=True, frozen=True)
class PoolStats:
    """Page-pool state in tokens. Invariant: free + evictable + locked + held == total."""

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


@dataclass(slots=True, frozen=True)
class StepStats:
    """One executed step, written by the scheduler when its result is processed."""

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
    num_pending_tokens: int
    """Sequence lengths waiting, plus the remainder of the sequence in mid-prefill."""
    num_sampled: int
    pool: PoolStats
    new_token_ratio: float
    refusals: Mapping[Refusal, int] = field(default_factory=dict)
    forward_s: float = 0.0
    sample_s: float = 0.0
    schedule_s: float = 0.0
    way: str = EAGER
    """As the executor says (``StepResult.way``)."""


@dataclass(slots=True, frozen=True)
class RequestStats:
    """One finished request as its client saw it; times in seconds, kept in the frontend."""

    rid: str
    num_prompt: int
    num_cached: int
    num_output: int
    num_retractions: int
    ttft_s: float
    e2e_s: float
    finish: str
