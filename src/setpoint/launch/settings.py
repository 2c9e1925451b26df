"""Converts options to the settings of the scheduler: those that are fixed, and the live ones, which
the frontend makes too, for a change. Pure, and without torch."""

from __future__ import annotations

from setpoint.config.groups.scheduling import SchedulingOptions
from setpoint.config.groups.tiers import StorageConfig
from setpoint.config.options import Options
from setpoint.config.pool import PoolConfig
from setpoint.config.resolved import ResolvedConfig
from setpoint.core.model import ModelSpec
from setpoint.core.settings import CadenceSettings, DelaySettings, PrioritySettings, Settings
from setpoint.core.transfers import KVLocation
from setpoint.scheduler.scheduler_config import RatioConfig, SchedulerConfig, TierConfig


def scheduler_config(config: ResolvedConfig, pool: PoolConfig, spec: ModelSpec) -> SchedulerConfig:
    options, env = config.options, config.env
    disaggregation = options.disaggregation
    return SchedulerConfig(
        num_slots=pool.max_running_requests,
        max_req_len=pool.max_req_len,
        max_req_input_len=pool.max_req_input_len,
        vocab_size=spec.vocab_size,
        eos_token_ids=frozenset(spec.eos_token_ids),
        seed=config.random_seed,
        waiting_timeout_s=env.req_waiting_timeout_s if env.req_waiting_timeout_s > 0 else None,
        running_timeout_s=env.req_running_timeout_s if env.req_running_timeout_s > 0 else None,
        handover_timeout_s=(
            env.bootstrap_timeout_s
            if disaggregation.role == "prefill"
            else env.disaggregation_waiting_timeout_s
        ),
        handover_interval=disaggregation.disaggregation_decode_polling_interval,
        num_reserved_decode_tokens=disaggregation.num_reserved_decode_tokens,
        role=disaggregation.role,
        depth=config.overlap_depth,
        ratio=RatioConfig(
            init=env.init_new_token_ratio,
            min_factor=env.min_new_token_ratio_factor,
            decay_steps=env.new_token_ratio_decay_steps,
            retract_decode_steps=env.retract_decode_steps,
        ),
        clip_max_new_tokens=env.clip_max_new_tokens,
        in_batch_check=env.in_batch_check_threshold,
        in_batch_deprioritize=env.in_batch_deprioritize_threshold,
        test_retract_interval=env.test_retract_interval if env.test_retract else 0,
        strict_accounting=options.scheduling.strict_accounting,
        tiers=tier_config(options, config.storage, page_size=config.page_size),
    )


def tier_config(options: Options, storage: StorageConfig, *, page_size: int) -> TierConfig | None:
    """None: there are no cache tiers."""
    tiers = options.tiers
    has_storage = tiers.hicache_storage_backend is not None
    if not tiers.enable_hierarchical_cache or not (
        has_storage or options.execution.device != "cpu"
    ):
        return None
    return TierConfig(
        block=-(-storage.block_tokens // page_size) * page_size,
        place=KVLocation.STORAGE if has_storage else KVLocation.HOST,
        threshold=storage.prefetch_threshold,
        write_policy=_write_policy(options),
        limits_loss=options.disaggregation.role != "decode",
        prefetch_policy=tiers.hicache_storage_prefetch_policy,
        timeout_base_s=storage.prefetch_timeout_base,
        timeout_per_ki_token_s=storage.prefetch_timeout_per_ki_token,
    )


def _write_policy(options: Options) -> str:
    """A decode server writes what no other server has: outputs, each once, if it is to."""
    own = options.disaggregation
    if own.role != "decode":
        return options.tiers.hicache_write_policy
    return "write_through" if own.disaggregation_decode_enable_offload_kvcache else "never"


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
