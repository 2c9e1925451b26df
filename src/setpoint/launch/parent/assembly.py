"""Builds the frontend of a configured server from its options, model and engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from setpoint.config.groups.answers import preferred_sampling
from setpoint.config.groups.events import publisher_info
from setpoint.config.groups.metrics import buckets_of, extra_labels
from setpoint.config.groups.model import chat_template_kwargs
from setpoint.config.groups.traces import otlp_url
from setpoint.config.options import Options, launch_command, server_args
from setpoint.config.resolved import ResolvedConfig
from setpoint.core.control import EngineFacts
from setpoint.core.model import ModelSpec
from setpoint.core.version import __version__
from setpoint.frontend.bootstrap_rooms import Sharing
from setpoint.frontend.composition import ServerParts, compose
from setpoint.frontend.config import FrontendConfig
from setpoint.frontend.pairing import KnownServers
from setpoint.frontend.residence import Residence
from setpoint.frontend.service import Service
from setpoint.frontend.supervision import Supervisor
from setpoint.frontend.telemetry.book import RequestBook
from setpoint.frontend.telemetry.metrics.metering import MetricsConfig
from setpoint.frontend.telemetry.request_events import Reader
from setpoint.frontend.telemetry.request_export import RequestExport
from setpoint.ipc.client import EngineClient
from setpoint.launch.parent.checkpoints import LaunchedCheckpoints
from setpoint.launch.parent.doctor import ServerDoctor
from setpoint.launch.parent.engine import Launched
from setpoint.launch.parent.live_config import LiveConfig
from setpoint.launch.parent.served_model import MachineShare, ServedModel

if TYPE_CHECKING:
    from setpoint.handover.prefill_servers import PrefillServers


def make_service(
    engine: Launched,
    client: EngineClient,
    facts: EngineFacts,
    live: LiveConfig,
    *,
    startup_s: float,
    of_server: ServerParts | None,
    residence: Residence | None,
    supervisor: Supervisor,
) -> Service:
    """startup_s: the duration of the start. of_server, residence: None for the only model.
    supervisor: starts the engines."""
    served, options = engine.served, engine.served.config.options
    config = _config(served, facts, startup_s)
    book = RequestBook()
    readers, at_end = _readers(options, book, config.served_model_name)
    pairing = _pairing(options)
    return compose(
        config,
        client,
        engine.text,
        live,
        of_server=of_server,
        residence=residence,
        checkpoints=LaunchedCheckpoints(options, served.source, served.spec),
        supervisor=supervisor,
        prefill_servers=pairing or _announced(options),
        pairing=pairing,
        book=book,
        readers=readers,
        make_doctor=ServerDoctor,
        workers=() if pairing is None else (pairing.watch,),
        at_end=at_end,
    )


def _config(served: ServedModel, facts: EngineFacts, startup_s: float) -> FrontendConfig:
    config, options, spec, source = served.config, served.config.options, served.spec, served.source
    return FrontendConfig(
        pooling=spec.pooling,
        model_path=options.model.model_path or source.name,
        served_model_name=options.model.served_model_name or source.name,
        tokenizer_path=options.model.tokenizer_path or str(source.folder),
        context_len=config.context_len,
        max_req_input_len=facts.max_req_input_len,
        pool_tokens=facts.max_total_num_tokens,
        vocab_size=spec.vocab_size,
        random_seed=config.random_seed,
        api_keys=options.server.api_keys,
        hidden_size=spec.hidden_size if options.answers.enable_return_hidden_states else None,
        admin_api_key=options.server.admin_api_key,
        follows_bootstrap_room=options.parallel.follows_bootstrap_room,
        sharing=_sharing(config),
        max_body_bytes=config.max_body_bytes,
        allow_auto_truncate=options.answers.allow_auto_truncate,
        refuse_unknown_keys=options.answers.refuse_unknown_keys,
        incremental_streaming_output=options.answers.incremental_streaming_output,
        enable_cache_report=options.answers.enable_cache_report,
        stream_include_usage=options.answers.stream_response_default_include_usage,
        stream_always_usage=options.answers.enable_force_include_usage,
        sampling_defaults=dict(served.sampling),
        preferred_sampling=preferred_sampling(options.answers),
        chat_template_kwargs=chat_template_kwargs(options.model),
        tool_call_parser=options.model.tool_call_parser,
        reasoning_parser=options.model.reasoning_parser,
        weight_version=options.model.weight_version,
        storage_backend=options.tiers.hicache_storage_backend,
        spec=spec,
        model_info=_model_info(spec, options),
        server_info=_server_info(served, startup_s),
        metrics=metrics_config(config, facts, startup_s=startup_s, share=served.share),
        profiles_folder=config.env.torch_profiler_dir,
        expert_records_folder=config.env.expert_distribution_recorder_dir,
        health_generates=config.env.health_endpoint_generation,
        health_timeout_s=config.env.health_check_timeout_s,
        watchdog_s=options.server.watchdog_timeout,
    )


def _server_info(served: ServedModel, startup_s: float) -> dict[str, Any]:
    return {
        **server_info(served.config, startup_s=startup_s),
        "launch_command": launch_command(served.config.options, served.asked.given),
    }


def _sharing(config: ResolvedConfig) -> Sharing:
    own = config.options.disaggregation
    return Sharing(
        own.role,
        own.disaggregation_bootstrap_port,
        config.env.header_overrides,
        finds_pairs=bool(own.disaggregation_prefill_servers),
    )


def _pairing(options: Options) -> PrefillServers | None:
    """The prefill servers that the command line names, to which a decode server sends bodies."""
    urls = options.disaggregation.disaggregation_prefill_servers
    if options.disaggregation.role != "decode" or not urls:
        return None
    from setpoint.handover.prefill_servers import PrefillServers

    return PrefillServers(urls, api_key=next(iter(options.server.api_keys), None))


def _announced(options: Options) -> KnownServers | None:
    """The prefill servers that announce themselves to a decode server."""
    if options.disaggregation.role != "decode":
        return None
    from setpoint.handover.announcements import AnnouncedServers

    return AnnouncedServers()


def _model_info(spec: ModelSpec, options: Options) -> dict[str, Any]:
    return {
        "model_type": spec.model_type,
        "architectures": [spec.architecture],
        "load_format": options.model.load_format,
    }


def _readers(
    options: Options, book: RequestBook, model_name: str
) -> tuple[tuple[Reader, ...], tuple[Callable[[], None], ...]]:
    """What exports and traces the ends of requests, and what sends the last of it."""
    readers: list[Reader] = []
    at_end: list[Callable[[], None]] = []
    folder = options.metrics.export_metrics_to_file_dir
    if options.metrics.export_metrics_to_file and folder is not None:
        readers.append(RequestExport(Path(folder), book).finished)
    if options.traces.enable_trace:
        # Here, because a server without traces may lack the library.
        from setpoint.frontend.telemetry.tracing import RequestTracer, sending_to

        url = otlp_url(options.traces.otlp_traces_endpoint)
        provider = sending_to(url, options.traces.otlp_service_name)
        readers.append(RequestTracer(provider, model_name=model_name).finished)
        at_end.append(provider.shutdown)
    return tuple(readers), tuple(at_end)


STARTUP_PHASES = ("load_weight", "kv_cache_allocation")
"""The parts of an engine's start for which SGLang has a name."""


def metrics_config(
    config: ResolvedConfig,
    facts: EngineFacts,
    *,
    startup_s: float,
    share: MachineShare | None = None,
) -> MetricsConfig | None:
    """The configuration of ``/metrics``; None without --enable-metrics."""
    options = config.options
    if not options.metrics.enable_metrics:
        return None
    return MetricsConfig(
        extra_labels=extra_labels(options.metrics),
        custom_labels=options.metrics.tokenizer_metrics_allowed_custom_labels,
        labels_header=options.metrics.tokenizer_metrics_custom_labels_header,
        buckets=buckets_of(options.metrics),
        engine_type="unified" if (role := options.disaggregation.role) == "null" else role,
        page_size=config.page_size,
        overlap=config.overlap_depth > 0,
        of_several=share is not None,
        startup_s={
            "tokenizer_e2e": startup_s,
            "scheduler_e2e": sum(facts.phases.values()),
            **{name: facts.phases[name] for name in STARTUP_PHASES if name in facts.phases},
        },
    )


def kv_events_info(config: ResolvedConfig) -> dict[str, Any] | None:
    """The addresses of KV events as ``/server_info`` shows them."""
    if config.events is None:
        return None
    return publisher_info(
        config.events,
        page_size=config.page_size,
        num_ranks=config.options.parallel.dp_size,
    )


def server_info(config: ResolvedConfig, *, startup_s: float) -> dict[str, Any]:
    """The part of ``/server_info`` that does not depend on the engine."""
    return {
        **server_args(config.options),
        "version": __version__,
        "startup_time": startup_s,
        "kv_events": kv_events_info(config),
        "decisions": [asdict(decision) for decision in config.decisions],
    }
