"""Converts options to the engine's live settings. Both processes do this: the engine at its start,
the frontend for a change. Pure, and without torch."""

from __future__ import annotations

from setpoint.config.options import Options
from setpoint.config.pool import PoolConfig
from setpoint.config.resolved import ResolvedConfig
from setpoint.core.settings import CadenceSettings, DelaySettings, PrioritySettings, Settings


def live_settings(config: ResolvedConfig, pool: PoolConfig) -> Settings:
    options = config.options
    return Settings(
        max_running_requests=pool.max_running_requests,
        policy=options.schedule_policy,
        priority=_priority(options),
        refuse_priority=options.abort_on_priority_when_disabled,
        cadence=CadenceSettings(
            prefill_decode_interval=config.prefill_decode_interval,
            min_decoding=options.prefill_decode_interval_min_bs,
            decode_after_piece=config.decode_after_piece,
            continuous_decode_steps=options.num_continuous_decode_steps,
        ),
        delay=_delay(options, pool),
        chunked_prefill_size=(
            config.chunked_prefill_size if config.chunked_prefill_size > 0 else None
        ),
        max_prefill_tokens=options.max_prefill_tokens,
        prefill_max_requests=options.prefill_max_requests,
        max_queued_requests=options.max_queued_requests,
        mixed_chunk=options.enable_mixed_chunk,
        conservativeness=options.schedule_conservativeness,
        stream_interval=options.stream_interval,
        decode_log_interval=options.decode_log_interval,
        log_level=options.log_level,
        log_request_times=options.enable_request_time_stats_logging,
    )


def _priority(options: Options) -> PrioritySettings | None:
    if not options.enable_priority_scheduling:
        return None
    return PrioritySettings(
        default=options.default_priority_value,
        low_first=options.schedule_low_priority_values_first,
        preempt=not options.disable_priority_preemption,
        threshold=options.priority_scheduling_preemption_threshold,
        retract_first=options.retraction_policy == "priority",
    )


def _delay(options: Options, pool: PoolConfig) -> DelaySettings:
    given_ms = options.prefill_delayer_max_delay_ms
    return DelaySettings(
        enabled=options.enable_prefill_delayer,
        low_usage=options.prefill_delayer_token_usage_low_watermark,
        queue_ratio=options.prefill_delayer_queue_min_ratio,
        min_free_slots=pool.min_free_slots,
        max_passes=options.prefill_delayer_max_delay_passes,
        max_delay_s=5.0 if given_ms is None else given_ms / 1e3,
    )
