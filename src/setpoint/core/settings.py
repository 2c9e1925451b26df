"""Settings that may change while an engine serves: one frozen value, replaced between two steps and
passed to the scheduler's rules with each call.

The values are resolved: the rules never see the user's options. ``scheduler.scheduler_config``
holds what is fixed for an engine's life.
"""

from __future__ import annotations

import msgspec

LEAST_URGENT = -(1 << 64)
"""An urgency lower than that of every priority that fits in a message."""


class PrioritySettings(msgspec.Struct, frozen=True):
    """Priority scheduling (docs/sglang/scheduling.md#priorities)."""

    default: int | None = None
    """Priority of a request that has none; None: lower than every other priority."""
    low_first: bool = False
    """True: smaller values are more urgent. False: larger values are more urgent."""
    preempt: bool = True
    threshold: int = 10
    """A running request may be preempted for a waiting one whose priority is better by more than
    this."""
    retract_first: bool = False
    """When the pool runs out of pages, retract the least urgent sequences first; False: those with
    the fewest outputs."""

    def urgency(self, priority: int | None) -> int:
        """The number that the scheduler's rules compare: larger is more urgent."""
        given = self.default if priority is None else priority
        if given is None:
            return LEAST_URGENT
        return -given if self.low_first else given


class CadenceSettings(msgspec.Struct, frozen=True):
    """Steps that are reserved for decoding."""

    prefill_decode_interval: int = 0
    """Number of decode steps between two prefill steps while any sequence decodes."""
    min_decoding: int = 0
    """``prefill_decode_interval`` applies only if at least this many sequences decode after the
    first of the two prefill steps."""
    decode_after_piece: int = 0
    """Number of decode steps, while any sequence decodes, after a step that computed nothing but a
    chunk of one prompt that is not finished."""
    continuous_decode_steps: int = 1
    """Number of decode steps from one check of the queue to the next."""


class DelaySettings(msgspec.Struct, frozen=True):
    """When admission waits for a larger batch."""

    enabled: bool = False
    """Wait until as many slots are free as the largest prefill batch so far took and, if
    ``queue_ratio`` is set, until the queue is long enough."""
    low_usage: float | None = None
    """``enabled`` causes no wait while the share of the KV pool in use is below this."""
    queue_ratio: float | None = None
    """Wait until the queue has this many requests per running one, or as many as the largest
    prefill batch had."""
    min_free_slots: int | None = None
    """Wait until this many slots are free, even if ``enabled`` is False."""
    max_passes: int = 30
    """Most scheduling passes that one wait may last."""
    max_delay_s: float = 5.0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the scheduler's rules and of the log."""

    max_running_requests: int
    """At most ``SchedulerConfig.num_slots``. Lowering it below the number of running requests ends
    none of them."""
    policy: str = "fcfs"
    priority: PrioritySettings | None = None
    """None: priorities have no effect."""
    refuse_priority: bool = False
    """With priorities off, refuse a request that has one."""
    cadence: CadenceSettings = CadenceSettings()
    delay: DelaySettings = DelaySettings()
    chunked_prefill_size: int | None = 2048
    """Most prompt tokens per step; None: prompts are not divided into chunks."""
    max_prefill_tokens: int = 16384
    prefill_max_requests: int | None = None
    max_queued_requests: int | None = None
    mixed_chunk: bool = False
    conservativeness: float = 1.0
    """Factor of the new-token ratio (docs/sglang/scheduling.md#new-token-ratio)."""
    stream_interval: int = 1
    decode_log_interval: int = 40
    """Number of decode steps between two log lines."""
    log_level: str = "info"
    log_request_times: bool = False
    """Write a log line for each request that ends, with where its time went."""
