"""The numbers a scheduler works with, all resolved: it never sees the user's options, only these."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, frozen=True)
class RatioConfig:
    """Conservativeness of admission (FACTS §2.1); defaults are SGLang 0.5.23's."""

    conservativeness: float = 1.0
    init: float = 0.7
    min_factor: float = 0.14
    decay_steps: int = 600
    retract_decode_steps: int = 20
    """Decode steps the kept requests should survive after a retraction."""


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
    """Whether a sequence may be planned again before its last result is known (overlap yes, pipeline stages no)."""
    ratio: RatioConfig = field(default_factory=RatioConfig)
    clip_max_new_tokens: int = 4096
    """An output longer than this is counted as this long when admission reserves memory (FACTS §2.4)."""
    in_batch_check: int = 32
    """lpm: a request with at most this many cached tokens is compared with the other waiting ones; -1 = never."""
    in_batch_deprioritize: int = 32
    """lpm: ... and goes last in this pass if it shares at least this many tokens with one of them."""
    test_retract_interval: int = 0
    """Retract on every k-th decode step (tests); 0 = never."""
    strict_accounting: bool = False
    """Check every invariant after every step instead of when idle."""
