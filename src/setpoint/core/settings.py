"""What may change while an engine serves: one frozen value, replaced between two steps and handed
to the scheduler's rules with each call.

Resolved values only: the rules never see the user's options. What is fixed for an engine's life is
``scheduler.config``.
"""

from __future__ import annotations

import msgspec

LEAST_URGENT = -(1 << 64)
"""Below every urgency that a priority in a message can give."""


class PrioritySettings(msgspec.Struct, frozen=True):
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

    def urgency(self, priority: int | None) -> int:
        """The number that the scheduler's rules compare: larger is more urgent."""
        given = self.default if priority is None else priority
        if given is None:
            return LEAST_URGENT
        return -given if self.low_first else given


class CadenceSettings(msgspec.Struct, frozen=True):
    """Turns that belong to decode alone."""

    prefill_decode_interval: int = 0
    """Decode steps between two prefill steps, while anyone decodes."""
    min_decoding: int = 0
    """... if at least this many do after the first of the two."""
    decode_after_piece: int = 0
    """Decode steps, while anyone decodes, after a step that read nothing but a piece of one prompt
    that goes on."""
    continuous_decode_steps: int = 1
    """Decode steps from one look at the queue to the next."""


class DelaySettings(msgspec.Struct, frozen=True):
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


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler's rules, and the log's."""

    max_running_requests: int
    """At most ``SchedulerConfig.num_slots``. Lowered below those that run, it ends none."""
    policy: str = "fcfs"
    priority: PrioritySettings | None = None
    """None = priorities mean nothing."""
    refuse_priority: bool = False
    """... and a request that has one is refused."""
    cadence: CadenceSettings = CadenceSettings()
    delay: DelaySettings = DelaySettings()
    chunked_prefill_size: int | None = 2048
    """Prompt tokens per step; None = whole prompts."""
    max_prefill_tokens: int = 16384
    prefill_max_requests: int | None = None
    max_queued_requests: int | None = None
    mixed_chunk: bool = False
    conservativeness: float = 1.0
    """Scales the new-token ratio (docs/sglang/scheduling.md#new-token-ratio)."""
    stream_interval: int = 1
    decode_log_interval: int = 40
    """Decode steps between two log lines."""
    log_level: str = "info"
