"""Converts the options of the command line to the configurations of the executor, the scheduler and
the cache. Pure conversions; this module starts and measures nothing. ``settings`` converts the
options that may change later.
"""

from __future__ import annotations

from pathlib import Path

from setpoint.config.options import Options
from setpoint.config.pool import memory_model
from setpoint.config.resolved import ResolvedConfig
from setpoint.core.model import ModelSpec
from setpoint.engine.executor.build_runner import EngineConfig
from setpoint.engine.runner.kv_pool import KVPool
from setpoint.launch.child.cache_tiers import TierSetup
from setpoint.launch.child.computation_identity import ComputationIdentity
from setpoint.launch.child.disaggregation import HandoverSetup
from setpoint.launch.job import EngineJob
from setpoint.launch.settings import tier_config
from setpoint.observe.work import WorkModel
from setpoint.recording.writer import RecordingConfig
from setpoint.scheduler.cache.manager import CacheConfig


def cache_config(config: ResolvedConfig, pool: KVPool) -> CacheConfig:
    options = config.options
    return CacheConfig(
        num_pages=pool.num_tokens // config.page_size,
        page_size=config.page_size,
        row=pool.layout.page_row,
        enabled=not options.memory.disable_radix_cache,
        eviction_policy=options.memory.radix_eviction_policy,
        eviction_parameters=dict(config.eviction_parameters),
    )


def engine_config(
    config: ResolvedConfig, spec: ModelSpec, folder: str, weights_folder: str = ""
) -> EngineConfig:
    options = config.options
    return EngineConfig(
        model_folder=folder,
        weights_folder=weights_folder,
        spec=spec,
        load_format=options.model.load_format,
        dtype=options.model.dtype,
        quantization=options.model.quantization,
        kv_dtype=options.model.kv_cache_dtype,
        device=options.execution.device,
        page_size=config.page_size,
        attention_backend=options.execution.attention_backend,
        decode_attention_backend=options.execution.decode_attention_backend,
        model_impl=options.model.model_impl,
        num_threads=config.num_threads,
        seed=config.random_seed,
        capture=not options.graphs.disable_cuda_graph,
        graph_sizes=config.graph_sizes,
        ep_size=options.experts.ep_size,
        ep_num_redundant_experts=options.experts.ep_num_redundant_experts,
        init_expert_location=options.experts.init_expert_location,
        quantization_param_path=options.model.quantization_param_path,
        moe_dense_tp_size=options.experts.moe_dense_tp_size,
        # CPUs keep the promise anyway.
        invariant=options.execution.enable_deterministic_inference
        and options.execution.device != "cpu",
    )


def computation_of(job: EngineJob) -> ComputationIdentity:
    return ComputationIdentity(
        engine_config(job.config, job.spec, job.folder), job.config.options.parallel
    )


def tier_setup(job: EngineJob) -> TierSetup | None:
    """None: there are no cache tiers."""
    options, storage = job.config.options, job.config.storage
    config = tier_config(options, storage, page_size=job.config.page_size)
    if config is None:
        return None
    return TierSetup(
        options=options.tiers,
        storage=storage,
        order=job.storage,
        is_restart=job.is_restart,
        env=job.config.env,
        block=config.block,
        weight_version=str(options.model.weight_version),
    )


def handover_setup(job: EngineJob) -> HandoverSetup | None:
    """None: the engine computes whole requests."""
    options = job.config.options
    own = options.disaggregation
    if own.role == "null":
        return None
    return HandoverSetup(
        role=own.role,
        host=options.server.host,
        bootstrap_port=own.disaggregation_bootstrap_port,
        server_key=bytes.fromhex(job.handover_key),
        api_key=next(iter(options.server.api_keys), None),
        checksums=own.disaggregation_enable_kv_checksum,
        dp_rank=job.rank or 0,
    )


def work_model(config: ResolvedConfig, spec: ModelSpec) -> WorkModel:
    memory = memory_model(config, spec)
    return WorkModel(
        spec=spec,
        weights_bytes=memory.weights_read(),
        experts_share=memory.experts_share(),
        dtype_bytes=config.dtype_bytes,
        kv_bytes=spec.kv_bytes_per_token(config.kv_element_bytes),
    )


def recording_config(options: Options) -> RecordingConfig | None:
    if options.recording.record is None:
        return None
    return RecordingConfig(
        path=Path(options.recording.record),
        content=options.recording.record_content,
        max_bytes=options.recording.record_max_bytes,
    )
