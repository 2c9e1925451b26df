"""The settings that are fixed for a scheduler's life, as resolved values: the scheduler never sees
the user's options. Settings that may change while it serves are in ``core.settings``."""

from __future__ import annotations

from dataclasses import dataclass, field

from setpoint.core.handover import Role
from setpoint.core.transfers import KVLocation


@dataclass(slots=True, frozen=True)
class RatioConfig:
    """How the new-token ratio moves (docs/sglang/scheduling.md#new-token-ratio); defaults are
    SGLang 0.5.23's."""

    init: float = 0.7
    min_factor: float = 0.14
    decay_steps: int = 600
    retract_decode_steps: int = 20
    """Number of decode steps that the remaining requests should survive after a retraction."""


@dataclass(slots=True, frozen=True)
class TierConfig:
    """What is loaded from cache tiers and saved to them; names and defaults are SGLang's."""

    block: int
    """Tokens of a block, a multiple of the page size: the smallest piece that is stored."""
    place: KVLocation = KVLocation.STORAGE
    """The slowest of the tiers, which names the transfers."""
    threshold: int = 256
    """Fewest tokens that are worth a lookup and a load."""
    write_policy: str = "write_through"
    """"write_through": what a sequence has computed is saved when it ends;
    "write_through_selective": if that has happened before; "write_back": before it is evicted;
    "never": another server saves."""
    limits_loss: bool = True
    """Whether less is saved if loads do not earn it back. Not where another server loads it."""
    prefetch_policy: str = "timeout"
    """When a request stops waiting: "best_effort": as soon as it could run; "wait_complete": never;
    "timeout": after ``timeout_base_s`` and ``timeout_per_ki_token_s`` for each 1,024 tokens."""
    timeout_base_s: float = 1.0
    timeout_per_ki_token_s: float = 0.25


@dataclass(slots=True, frozen=True)
class SchedulerConfig:
    """Written once by ``launch`` after the memory plan; every limit is final."""

    num_slots: int
    """Most sequences that the engine can run at a time; ``Settings.max_running_requests`` may be
    smaller."""
    max_req_len: int
    """Most prompt + output tokens of a request: min(context, pool capacity) - 1."""
    max_req_input_len: int
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    seed: int = 0
    """Seed of the random policy."""
    waiting_timeout_s: float | None = None
    """Longest time in the queue, counted from zero after a retraction; None = no limit."""
    running_timeout_s: float | None = None
    """Longest time since the last admission; None = no limit."""
    max_preparing_requests: int = 1024
    """Most requests that may wait for their grammar at a time; one more is refused."""
    preparation_timeout_s: float = 60.0
    """Longest time that a request waits for its grammar."""
    handover_timeout_s: float = 300.0
    """Longest time that a request waits for the server that computes its other part."""
    handover_interval: int = 1
    """Turns between two attempts to make room for prompts that arrive."""
    num_reserved_decode_tokens: int = 512
    """Tokens for each running sequence that prompts which arrive leave free."""
    role: Role = "null"
    """What the engine does of a request. On a prefill server requests end with their first
    token."""
    tiers: TierConfig | None = None
    """None: there are no cache tiers."""
    depth: int = 0
    """Number of steps in flight: 0 = synchronous, 1 = overlapped, more = pipelined."""
    replan_inflight: bool = True
    """Whether a sequence may be planned again before its last result is known (overlap yes,
    pipeline stages no)."""
    max_tokens_per_row: int = 1
    """Most tokens that a decode row may bring back. The row takes pages for all of them when it is
    planned."""
    ratio: RatioConfig = field(default_factory=RatioConfig)
    clip_max_new_tokens: int = 4096
    """An output longer than this is counted as this long when admission reserves memory
    (docs/sglang/scheduling.md#admission)."""
    in_batch_check: int = 32
    """Under policies that match prefixes, waiting requests with at most this many cached tokens are
    compared with each other; -1 = never."""
    in_batch_deprioritize: int = 32
    """A request that shares at least this many tokens with an earlier one in that comparison goes
    last in this pass."""
    test_retract_interval: int = 0
    """Retract on every k-th decode step (tests); 0 = never."""
    strict_accounting: bool = False
    """Check every invariant after every step instead of when idle."""
