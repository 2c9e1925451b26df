"""Options of what a server tells its operator: logs and metrics. ``options`` says what is common to
all declarations."""

from __future__ import annotations

from typing import Annotated

from setpoint.config.declare import Option
from setpoint.config.execution_options import ExecutionOptions

LOGS = "Logs"
METRICS = "Metrics"
TRACES = "Traces"

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


class ObservabilityOptions(ExecutionOptions, frozen=True, kw_only=True):
    """The user's wishes about logs and metrics."""

    # -- Logs
    log_level: Annotated[
        str, Option(LOGS, "Minimum severity of what is logged.", choices=LOG_LEVELS, live=True)
    ] = "info"
    log_level_http: Annotated[
        str | None,
        Option(
            LOGS,
            "Minimum severity of what the HTTP server logs; --log-level if not given.",
            choices=LOG_LEVELS,
            live=True,
            server_only=True,
        ),
    ] = None
    uvicorn_access_log_exclude_prefixes: Annotated[
        tuple[str, ...],
        Option(
            LOGS,
            "Path prefixes that are left out of the lines about HTTP requests, such as /metrics"
            " /health.",
            metavar="PATH",
            server_only=True,
        ),
    ] = ()
    log_requests: Annotated[
        bool, Option(LOGS, "Log every request when it arrives and when it is done.", live=True)
    ] = False
    log_requests_level: Annotated[
        int,
        Option(
            LOGS,
            "What --log-requests shows: 0 metadata; 1 also sampling parameters; 2 also"
            " shortened input and output; 3 everything.",
            choices=(0, 1, 2, 3),
            live=True,
        ),
    ] = 2
    log_requests_format: Annotated[
        str,
        Option(
            LOGS,
            "Format of the lines of --log-requests: text, or one JSON object per line.",
            choices=("text", "json"),
            live=True,
        ),
    ] = "text"
    enable_request_time_stats_logging: Annotated[
        bool,
        Option(
            LOGS,
            "Log, for each request that ends, how long it waited and ran in the engine.",
            live=True,
        ),
    ] = False
    decode_log_interval: Annotated[
        int, Option(LOGS, "Decode steps between two 'Decode batch' lines.", low=1, live=True)
    ] = 40

    # -- Metrics
    export_metrics_to_file: Annotated[
        bool,
        Option(
            METRICS,
            "Append a line of JSON for every request that ends, without its content, to"
            " sglang-request-metrics-DATE_HOUR.log in --export-metrics-to-file-dir.",
            server_only=True,
        ),
    ] = False
    export_metrics_to_file_dir: Annotated[
        str | None,
        Option(
            METRICS,
            "Folder for the files of --export-metrics-to-file.",
            metavar="FOLDER",
            server_only=True,
        ),
    ] = None
    enable_metrics: Annotated[
        bool,
        Option(
            METRICS,
            "Count requests and steps, serve /metrics for Prometheus (docs/metrics.md), and put"
            " timings into meta_info.",
            server_only=True,
        ),
    ] = False
    extra_metric_labels: Annotated[
        str,
        Option(
            METRICS,
            "JSON object with labels for every series of the scheduler and of requests.",
            metavar="JSON",
            server_only=True,
        ),
    ] = "{}"
    tokenizer_metrics_allowed_custom_labels: Annotated[
        tuple[str, ...],
        Option(
            METRICS,
            "Labels that a client may set for its request; at most 200 combinations of"
            " their values are distinguished.",
            metavar="NAME",
            server_only=True,
        ),
    ] = ()
    tokenizer_metrics_custom_labels_header: Annotated[
        str,
        Option(
            METRICS,
            "Header in which clients send these labels, as a JSON object.",
            server_only=True,
        ),
    ] = "x-custom-labels"
    bucket_time_to_first_token: Annotated[
        tuple[float, ...],
        Option(
            METRICS,
            "Upper bounds of the buckets of time_to_first_token_seconds; SGLang's if not given.",
            metavar="SECONDS",
            low=0,
            server_only=True,
        ),
    ] = ()
    bucket_inter_token_latency: Annotated[
        tuple[float, ...],
        Option(
            METRICS,
            "Upper bounds of the buckets of inter_token_latency_seconds; SGLang's if not given.",
            metavar="SECONDS",
            low=0,
            server_only=True,
        ),
    ] = ()
    bucket_e2e_request_latency: Annotated[
        tuple[float, ...],
        Option(
            METRICS,
            "Upper bounds of the buckets of e2e_request_latency_seconds; SGLang's if not given.",
            metavar="SECONDS",
            low=0,
            server_only=True,
        ),
    ] = ()
    prompt_tokens_buckets: Annotated[
        tuple[str, ...],
        Option(
            METRICS,
            "Upper bounds of the buckets of both histograms of prompt tokens: 'default', 'tse"
            " MIDDLE BASE COUNT'"
            " (distances from the middle grow as powers of the base, to both sides), or 'custom'"
            " and the bounds.",
            metavar="RULE",
            server_only=True,
        ),
    ] = ("default",)
    generation_tokens_buckets: Annotated[
        tuple[str, ...],
        Option(
            METRICS,
            "Upper bounds of the buckets of generation_tokens_histogram, in the same form.",
            metavar="RULE",
            server_only=True,
        ),
    ] = ("default",)

    # -- Traces
    enable_trace: Annotated[
        bool,
        Option(
            TRACES,
            "Send spans of every request to an OpenTelemetry collector (docs/traces.md). Needs the"
            " extra 'trace'.",
            server_only=True,
        ),
    ] = False
    trace_modules: Annotated[
        str, Option(TRACES, "What is traced.", choices=("request",), server_only=True)
    ] = "request"
    otlp_traces_endpoint: Annotated[
        str,
        Option(
            TRACES,
            "Address of the collector's receiver for OTLP over HTTP: HOST:PORT or a URL. gRPC, by"
            " convention on port 4317, is not supported.",
            metavar="ADDRESS",
            server_only=True,
        ),
    ] = "localhost:4318"
    otlp_service_name: Annotated[
        str | None,
        Option(
            TRACES,
            "Name of the service in the spans; setpoint if not given.",
            metavar="NAME",
            server_only=True,
        ),
    ] = None
