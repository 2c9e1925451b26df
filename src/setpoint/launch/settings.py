"""Converts options to the engine's live settings. Both processes do this: the engine at its start,
the frontend for a change. Pure, and without torch."""

from __future__ import annotations

from setpoint.config.groups.scheduling import SchedulingOptions
from setpoint.config.pool import PoolConfig
from setpoint.config.resolved import ResolvedConfig
from setpoint.core.settings import CadenceSettings, DelaySettings, PrioritySettings, Settings


def live_settings(config: ResolvedConfig, pool: PoolConfig) -> Settings:
    options = config.options
    scheduling = options.scheduling
    return Settings(
        max_running_requests=pool.max_running_requests,
        policy=scheduling.schedule_policy,
        priority=_priority(scheduling),
        refuse_priority=scheduling.abort_on_priority_when_disabled,
        cadence=CadenceSettings(
            prefill_decode_interval=config.prefill_decode_interval,
            min_decoding=scheduling.prefill_decode_interval_min_bs,
            decode_after_piece=config.decode_after_piece,
            continuous_decode_steps=scheduling.num_continuous_decode_steps,
        ),
        delay=_delay(scheduling, pool),
        chunked_prefill_size=(
            config.chunked_prefill_size if config.chunked_prefill_size > 0 else None
        ),
        max_prefill_tokens=scheduling.max_prefill_tokens,
        prefill_max_requests=scheduling.prefill_max_requests,
        max_queued_requests=scheduling.max_queued_requests,
        mixed_chunk=scheduling.enable_mixed_chunk,
        conservativeness=scheduling.schedule_conservativeness,
        stream_interval=options.answers.stream_interval,
        decode_log_interval=options.logs.decode_log_interval,
        log_level=options.logs.log_level,
        log_request_times=options.logs.enable_request_time_stats_logging,
    )


def _priority(scheduling: SchedulingOptions) -> PrioritySettings | None:
    if not scheduling.enable_priority_scheduling:
        return None
    return PrioritySettings(
        default=scheduling.default_priority_value,
        low_first=scheduling.schedule_low_priority_values_first,
        preempt=not scheduling.disable_priority_preemption,
        threshold=scheduling.priority_scheduling_preemption_threshold,
        retract_first=scheduling.retraction_policy == "priority",
    )


def _delay(scheduling: SchedulingOptions, pool: PoolConfig) -> DelaySettings:
    given_ms = scheduling.prefill_delayer_max_delay_ms
    return DelaySettings(
        enabled=scheduling.enable_prefill_delayer,
        low_usage=scheduling.prefill_delayer_token_usage_low_watermark,
        queue_ratio=scheduling.prefill_delayer_queue_min_ratio,
        min_free_slots=pool.min_free_slots,
        max_passes=scheduling.prefill_delayer_max_delay_passes,
        max_delay_s=5.0 if given_ms is None else given_ms / 1e3,
    )
