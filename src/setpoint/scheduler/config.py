"""The numbers a scheduler works with, all resolved: it never sees the user's options, only
these."""

from __future__ import annotations

from dataclasses import dataclass, field

LAST_RANK = 1 << 64
"""Behind every priority that fits a message."""


@dataclass(slots=True, frozen=True)
class RatioConfig:
    """Conservativeness of admission (docs/sglang/scheduling.md#new-token-ratio); defaults are
    SGLang 0.5.23's."""

    conservativeness: float = 1.0
    init: float = 0.7
    min_factor: float = 0.14
    decay_steps: int = 600
    retract_decode_steps: int = 20
    """Decode steps the kept requests should survive after a retraction."""


@dataclass(slots=True, frozen=True)
class PriorityConfig:
    """Priority scheduling (docs/sglang/scheduling.md#priorities)."""

    default: int | None = None
    """Priority of a request that has none; None = worse than any."""
    low_first: bool = False
    """Small values are urgent instead of large ones."""
    preempt: bool = True
    threshold: int = 10
    """A running request makes room for one whose priority is better by more than this."""
    retract_first: bool = False
    """A dry pool takes its memory back from the least urgent; otherwise from those with the fewest
    outputs."""

    def rank(self, priority: int | None) -> int:
        """The number the scheduler's rules compare: lower is more urgent."""
        given = self.default if priority is None else priority
        if given is None:
            return LAST_RANK
        return given if self.low_first else -given


@dataclass(slots=True, frozen=True)
class CadenceConfig:
    prefill_decode_interval: int = 0
    """Decode steps between two prefill steps, while anyone decodes."""
    min_decoding: int = 0
    """... if at least this many do after the first of the two."""
    decode_after_piece: int = 0
    """Decode steps, while anyone decodes, after a step that read nothing but a piece of one prompt
    that goes on."""
    continuous_decode_steps: int = 1
    """Decode steps from one look at the queue to the next."""


@dataclass(slots=True, frozen=True)
class DelayConfig:
    """When admission waits for a larger batch."""

    enabled: bool = False
    """Wait for as many free slots as the largest prefill batch took so far, and for the queue if
    there is a ``queue_ratio``."""
    low_usage: float | None = None
    """Below this share of the KV pool in use ``enabled`` waits for nothing."""
    queue_ratio: float | None = None
    """Wait until so many requests per running one are queued, or as many as the largest batch
    had."""
    min_free_slots: int | None = None
    """Wait for so many free slots, whatever ``enabled`` says."""
    max_passes: int = 30
    """Scheduling passes that one wait may last."""
    max_delay_s: float = 5.0


@dataclass(slots=True, frozen=True)
class SchedulerConfig:
    """Written once by ``launch`` after the memory plan; every limit is final."""

    max_running_requests: int
    max_req_len: int
    """Prompt + output tokens a request may reach: min(context, pool capacity) - 1."""
    max_req_input_len: int
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    policy: str = "fcfs"
    seed: int = 0
    """Of the random policy."""
    priority: PriorityConfig | None = None
    """None = priorities mean nothing."""
    refuse_priority: bool = False
    """... and a request that has one is refused."""
    cadence: CadenceConfig = field(default_factory=CadenceConfig)
    delay: DelayConfig = field(default_factory=DelayConfig)
    waiting_timeout_s: float | None = None
    """Longest stay in the queue, counted anew after a retraction; None = no limit."""
    running_timeout_s: float | None = None
    """Longest time from an admission on."""
    chunked_prefill_size: int | None = 2048
    """Prompt tokens per step; None = whole prompts."""
    max_prefill_tokens: int = 16384
    prefill_max_requests: int | None = None
    max_queued_requests: int | None = None
    mixed_chunk: bool = False
    stream_interval: int = 1
    depth: int = 0
    """Steps in flight: 0 synchronous, 1 overlapped, more = pipelined."""
    replan_inflight: bool = True
    """Whether a sequence may be planned again before its last result is known (overlap yes,
    pipeline stages no)."""
    max_tokens_per_row: int = 1
    """The most tokens that the result of a decode row may bring, for all of which it takes pages
    beforehand."""
    ratio: RatioConfig = field(default_factory=RatioConfig)
    clip_max_new_tokens: int = 4096
    """An output longer than this is counted as this long when admission reserves memory
    (docs/sglang/scheduling.md#admission)."""
    in_batch_check: int = 32
    """Policies that match prefixes: requests with at most this many cached tokens are compared with
    each other; -1 = never."""
    in_batch_deprioritize: int = 32
    """... and one goes last in this pass if it shares at least this many tokens with an earlier
    one."""
    test_retract_interval: int = 0
    """Retract on every k-th decode step (tests); 0 = never."""
    strict_accounting: bool = False
    """Check every invariant after every step instead of when idle."""
