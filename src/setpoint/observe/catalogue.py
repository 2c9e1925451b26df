"""Every series of ``/metrics``, declared once: the registry and ``docs/metrics.md`` are made from
it. The names ``sglang:*`` mean what they mean in SGLang; ``setpoint:*`` are for what has no name
there."""

from __future__ import annotations

from setpoint.observe.series import Kind, Scope, Series

QUEUE_TIME = (
    *(0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 3, 4, 5, 10, 15, 20, 30),
    *range(40, 101, 10),
    *range(200, 1001, 100),
    *range(1200, 2001, 200),
    *(2500, 3000),
)
STAGE_LATENCY = tuple(0.001 * 1.62**power for power in range(30))
GRAMMAR_TIME = (0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 90, 120, 240)
FIRST_TOKEN = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
WHOLE_REQUEST = (*FIRST_TOKEN, 600, 1200, 1800, 2400)
BETWEEN_TOKENS = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08),
    *(0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8),
)
TRANSFER_SPEED = (0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 5, 7.5, 10, 20, 50, 100)
TRANSFER_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 30000, 60000)
TRANSFER_MB = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
REQUESTS_PER_KEY = (1, 2, 3, 5, 7, 10, 20, 50, 100, 200)
"""Upper bounds of the ranges in which routing keys are counted."""
TOKEN_COUNTS = (
    *(100, 300, 500, 700, 1000, 1500, 2000),
    *range(3000, 10001, 1000),
    *range(12500, 30001, 2500),
    *(35000, 40000, 60000, 80000, 100000, 200000, 300000, 400000, 600000, 800000),
    *(1000000, 1100000),
)


def _series(scope: Scope, kind: Kind, *rows: tuple[str, ...]) -> tuple[Series, ...]:
    """rows: name, help, labels. A name without a namespace is one of SGLang's."""
    return tuple(
        Series(_full(name), kind, scope, text, tuple(labels)) for name, text, *labels in rows
    )


def _histograms(scope: Scope, *rows: tuple[str, str, str, tuple[float, ...]]) -> tuple[Series, ...]:
    """rows: name, help, label or "", buckets."""
    return tuple(
        Series(_full(name), Kind.HISTOGRAM, scope, text, (label,) if label else (), buckets)
        for name, text, label, buckets in rows
    )


def _full(name: str) -> str:
    return name if ":" in name else f"sglang:{name}"


ENGINE_GAUGES = _series(
    Scope.SCHEDULER,
    Kind.GAUGE,
    ("num_running_reqs", "Running requests."),
    ("num_queue_reqs", "Requests that wait for admission, including retracted ones."),
    ("num_grammar_queue_reqs", "Requests that wait for their grammar."),
    ("num_prefill_bootstrap_queue_reqs", "Requests that no decode server has asked for yet."),
    ("num_prefill_inflight_queue_reqs", "Computed prompts on their way to a decode server."),
    ("num_decode_prealloc_queue_reqs", "Requests for whose prompt the pool has no room yet."),
    ("num_decode_transfer_queue_reqs", "Prompts on their way from a prefill server."),
    ("num_paused_reqs", "Requests that wait because generation is paused."),
    ("num_retracted_reqs", "Requests retracted since the last 'Decode batch' line of the log."),
    ("num_unique_running_routing_keys", "Distinct routing keys of the running requests."),
    (
        "routing_key_running_req_count",
        "Routing keys by their running requests: keys with more than gt and at most le of them.",
        "gt",
        "le",
    ),
    (
        "routing_key_all_req_count",
        "The same by their running and queued requests together.",
        "gt",
        "le",
    ),
    ("prefill_queue_depth", "Queued requests that have not run yet."),
    ("decode_queue_depth", "Queued requests that were retracted, and go on where they stopped."),
    ("gen_throughput", "Tokens per second in the last decode log interval; 0 after 30 s idle."),
    ("cache_hit_rate", "Share of the last prefill step's prompt tokens that were cached."),
    ("decode_sum_seq_lens", "Tokens of the running requests, prompts and outputs together."),
    ("token_usage", "Share of the KV pool that is neither free nor evictable."),
    ("full_token_usage", "The same as token_usage: one pool serves every kind of layer."),
    ("num_used_tokens", "Tokens of the KV pool that are neither free nor evictable."),
    ("kv_used_tokens", "The same as num_used_tokens."),
    ("kv_available_tokens", "Tokens of the KV pool that are free."),
    ("kv_evictable_tokens", "Tokens of the KV pool that are cached and used by no request."),
    ("utilization", "The larger share in use: of the KV pool, or of the request slots."),
    (
        "new_token_ratio",
        "Share of the possible outputs of running requests for which memory is reserved.",
    ),
    ("is_cuda_graph", "Whether the last step replayed a captured one, on any device."),
    ("max_total_num_tokens", "Tokens that the KV pool holds."),
    ("page_size", "Tokens per page of the KV pool."),
    ("num_pages", "Pages of the KV pool."),
    ("context_len", "Maximum length of a sequence, prompt and output together."),
    ("weight_memory_usage_gb", "Memory of the weights in GiB."),
    ("kv_cache_memory_usage_gb", "Memory of the KV pool in GiB."),
    (
        "startup_available_gpu_memory_gb",
        "Memory in GiB that was free when the engine was ready; on a CPU, that of the machine.",
    ),
    ("graph_memory_usage_gb", "Memory of captured steps in GiB; one amount for all.", "phase"),
    (
        "eplb_balancedness",
        "Mean / max of the tokens that the ranks' experts got since they were placed, averaged over"
        " the layers: 1 if all got the same.",
    ),
    (
        "setpoint:expert_balancedness",
        "Mean / max of the tokens of a layer's experts since the weights were loaded, averaged over"
        " the layers.",
    ),
    ("setpoint:unused_experts", "Experts of all layers that have got no token yet."),
    ("setpoint:expert_rebalances", "How often experts were placed anew (--enable-eplb)."),
    (
        "setpoint:expert_rank_tokens",
        "Tokens that the experts of each rank got since they were placed, over all layers.",
        "ep_rank",
    ),
    ("setpoint:cache_tier_off", "1 if the cache tiers are not used any more, else 0."),
    (
        "setpoint:cache_tier_thrifty",
        "1 if only blocks that were used twice are saved, because saving has not paid.",
    ),
    ("setpoint:cache_tier_blocks", "Blocks in the cache tiers, of all who use them."),
    ("setpoint:cache_tier_bytes", "Bytes of these blocks."),
    ("setpoint:fallbacks", "Features that run in a slower way than was asked for."),
)

ENGINE_COUNTERS = _series(
    Scope.SCHEDULER,
    Kind.COUNTER,
    ("prefetched_tokens", "Tokens that were loaded from cache tiers into the KV pool."),
    ("backuped_tokens", "Tokens that were saved to cache tiers."),
    (
        "storage_prefetch_unfulfilled_tokens",
        "Tokens that cache tiers had, or might have had, and that were computed.",
        "reason",
    ),
    ("hicache_dropped_tokens", "Tokens that were not saved to cache tiers.", "reason"),
    (
        "setpoint:cache_tier_seconds",
        "Work of the cache tiers' threads, and what it saved: seconds"
        " of loading, of saving, and of computing what was loaded (earned).",
        "part",
    ),
    (
        "setpoint:cache_tier_lost_blocks",
        "Blocks that were damaged, evicted from the cache tiers, or refused by them.",
        "why",
    ),
    ("num_retracted_requests", "Requests sent back to the queue because memory ran out."),
    ("num_bootstrap_failed_reqs", "Requests whose other server could not be found or did not ask."),
    ("num_transfer_failed_reqs", "Requests whose prompt did not move to the decode server."),
    ("num_retracted_input_tokens", "Prompt tokens of retracted requests."),
    ("num_retracted_output_tokens", "Output tokens that retracted requests had, and kept."),
    ("cuda_graph_passes", "Steps, by their kind and whether a captured one was replayed.", "mode"),
    ("realtime_tokens", "Tokens: prefill_compute, prefill_cache, decode.", "mode"),
    ("prefill_effective_tokens", "Prompt tokens of first admissions: input, device_hit.", "mode"),
    ("forward_execution_seconds", "Time of forward passes: extend, mixed, decode.", "category"),
    (
        "scheduler_stage_seconds",
        "Time of the loop's turns: plan, run_batch (the executor), link (messages), rest.",
        "category",
        "forward_overlap",
    ),
    ("scheduler_idle_seconds", "Time in which no step was planned or run."),
    ("scheduler_process_cpu_seconds", "CPU time of the engine's process."),
    (
        "estimated_flops_per_gpu",
        "Estimated floating-point operations of steps (--enable-mfu-metrics).",
    ),
    (
        "estimated_read_bytes_per_gpu",
        "Estimated bytes that steps read from memory (--enable-mfu-metrics).",
    ),
    (
        "estimated_write_bytes_per_gpu",
        "Estimated bytes that steps wrote to memory (--enable-mfu-metrics).",
    ),
    ("num_grammar", "Requests with a grammar, whether it was compiled, cached or failed."),
    ("num_grammar_cache_hit", "Requests whose grammar was in the cache."),
    (
        "num_grammar_aborted",
        "Requests whose grammar was refused, or that ended before it was ready.",
    ),
    ("num_grammar_timeout", "Requests whose grammar was not ready in time."),
    (
        "setpoint:forced_tokens",
        "Output tokens that were not sampled, because a grammar allowed no other.",
    ),
    (
        "setpoint:late_grammars",
        "How often a request left the batch until its slow grammar knew what may come next.",
    ),
    (
        "setpoint:queue_refusals",
        "Requests that a step did not admit, by reason; counted again at every step.",
        "reason",
    ),
    (
        "setpoint:ended_requests",
        "Requests that ended in the engine: stop, length, abort, or a status.",
        "how",
    ),
    ("setpoint:preempted_requests", "Running requests that made room for more urgent ones."),
    ("setpoint:clipped_requests", "Requests whose max_new_tokens was lowered to fit the pool."),
    ("setpoint:failed_sends", "Events that could not be sent to the frontend."),
    (
        "setpoint:rebuilt_pools",
        "KV pools rebuilt because an idle engine found an error in its page accounting.",
    ),
    ("setpoint:turn_seconds", "Time of the loop's turns: plan, model, link, rest.", "part"),
)

ENGINE_HISTOGRAMS = _histograms(
    Scope.SCHEDULER,
    ("queue_time_seconds", "Time from joining the queue to first admission.", "", QUEUE_TIME),
    (
        "per_stage_req_latency_seconds",
        "Time in each stage: prefill_waiting, prefill_forward, decode_forward.",
        "stage",
        STAGE_LATENCY,
    ),
    ("grammar_compilation_time_seconds", "Time to compile a grammar.", "", GRAMMAR_TIME),
    ("kv_transfer_speed_gb_s", "Rate at which a prompt's pages moved.", "", TRANSFER_SPEED),
    ("kv_transfer_latency_ms", "From the first page of a prompt to the last.", "", TRANSFER_MS),
    ("kv_transfer_total_mb", "Size of a prompt's pages that moved.", "", TRANSFER_MB),
    ("kv_transfer_bootstrap_ms", "From asking for a prompt to its first page.", "", TRANSFER_MS),
    ("kv_transfer_alloc_ms", "Time for which a prompt waited for room.", "", TRANSFER_MS),
)

REQUEST_COUNTERS = _series(
    Scope.REQUEST,
    Kind.COUNTER,
    ("num_requests", "Sequences that ended; a request with n = 2 has two.", "is_streaming"),
    ("prompt_tokens", "Prompt tokens of ended sequences.", "is_streaming"),
    ("generation_tokens", "Output tokens of ended sequences.", "is_streaming"),
    (
        "cached_tokens",
        "Prompt tokens that were found in the cache: in the KV pool (device), or loaded for the"
        " request from host memory (host) or from storage.",
        "cache_source",
    ),
    ("num_so_requests", "Ended sequences with structured output."),
    ("num_aborted_requests", "Sequences that were aborted, or whose client left."),
)

REQUEST_HISTOGRAMS = _histograms(
    Scope.REQUEST,
    (
        "time_to_first_token_seconds",
        "Time from a request's arrival to its first token.",
        "is_streaming",
        FIRST_TOKEN,
    ),
    (
        "inter_token_latency_seconds",
        "Time between tokens; divided equally among tokens that arrive together.",
        "",
        BETWEEN_TOKENS,
    ),
    (
        "request_time_per_output_token_seconds",
        "Mean time per token after the first, of completed sequences.",
        "",
        BETWEEN_TOKENS,
    ),
    (
        "e2e_request_latency_seconds",
        "Time from a request's arrival to its end, if it was completed.",
        "is_streaming",
        WHOLE_REQUEST,
    ),
    ("prompt_tokens_histogram", "Prompt tokens of completed sequences.", "", TOKEN_COUNTS),
    (
        "uncached_prompt_tokens_histogram",
        "Prompt tokens of completed sequences that were not in the cache.",
        "",
        TOKEN_COUNTS,
    ),
    ("generation_tokens_histogram", "Output tokens of completed sequences.", "", TOKEN_COUNTS),
)

SERVER_SERIES = (
    *_series(
        Scope.SERVER,
        Kind.COUNTER,
        ("http_requests", "HTTP requests.", "endpoint", "method"),
        ("http_responses", "HTTP responses.", "endpoint", "status_code", "method"),
        (
            "process_cpu_seconds",
            "CPU time of the frontend (tokenizer); the engine has scheduler_process_cpu_seconds.",
            "component",
        ),
        ("setpoint:truncated_prompts", "Prompts cut by --allow-auto-truncate."),
        ("setpoint:lowered_limits", "max_new_tokens lowered by --allow-auto-truncate."),
        ("setpoint:warned_requests", "Bodies with unknown keys or parts, which were ignored."),
        (
            "setpoint:unenforced_schemas",
            "Requests with a JSON schema of which a part is not enforced.",
        ),
        (
            "setpoint:unread_answers",
            "Connections closed because their clients had stopped reading.",
        ),
        ("setpoint:lost_exports", "Lines that --export-metrics-to-file could not write."),
        ("setpoint:engine_starts", "Engine processes that were started."),
        (
            "setpoint:prompts_without_prefill_server",
            "Bodies whose prompts a decode server computed itself because none of its prefill"
            " servers answered (--disaggregation-prefill-servers).",
        ),
        (
            "setpoint:standby_deaths",
            "Standby engines that ended or could not start (--engine-standby).",
        ),
        ("setpoint:kv_event_batches", "Batches of KV events that were published."),
        (
            "setpoint:kv_event_overruns",
            "How often a subscriber to KV events fell so far behind that it missed batches.",
        ),
        ("setpoint:model_loads", "How often one of several models was loaded again."),
        ("setpoint:model_load_seconds", "The time that this took."),
    ),
    *_series(
        Scope.SERVER,
        Kind.GAUGE,
        ("http_requests_active", "HTTP requests in progress."),
        ("routing_keys_active", "Distinct routing keys of open requests."),
        (
            "startup_time_seconds",
            "Time to start: the whole server (tokenizer_e2e), the engine (scheduler_e2e), and of it"
            " load_weight and kv_cache_allocation.",
            "phase",
        ),
        ("setpoint:engine_up", "Whether an engine takes requests now."),
        (
            "setpoint:standby_ready",
            "Whether a standby engine can take the place of one that dies (--engine-standby).",
        ),
        (
            "setpoint:rank_up",
            "Whether the engine of a data-parallel rank takes requests now.",
            "dp_rank",
        ),
        ("setpoint:unread_bytes", "Bytes of answers that wait for clients who are slow to read."),
        (
            "setpoint:engine_restarts_left",
            "How many engines may be started again within this hour (--max-engine-restarts).",
        ),
        ("setpoint:model_loaded", "Whether one of several models is loaded now."),
        (
            "setpoint:model_waiting_requests",
            "Requests that wait until one of several models is loaded.",
        ),
        ("setpoint:engine_figures_age_seconds", "Age of the scheduler's series."),
        (
            "setpoint:prefill_server_up",
            "Whether a prefill server of --disaggregation-prefill-servers takes prompts now.",
            "url",
        ),
        (
            "setpoint:binding_limit",
            "1 for the limit that bound in the last two minutes, 0 for those that bound before.",
            "limit",
        ),
    ),
)

SERIES: tuple[Series, ...] = (
    *ENGINE_GAUGES,
    *ENGINE_COUNTERS,
    *ENGINE_HISTOGRAMS,
    *REQUEST_COUNTERS,
    *REQUEST_HISTOGRAMS,
    *SERVER_SERIES,
)

BY_NAME = {series.name: series for series in SERIES}
