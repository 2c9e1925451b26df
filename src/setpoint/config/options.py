"""Every option of a server and its engine, declared once: name, type, default, help, choices,
bounds, tuning range.

Names, meanings and defaults are SGLang 0.5.23's. The parser, ``docs/flags.md``, ``/server_info``
and the checks are generated from here. It does not know what "auto" becomes: that is ``resolve``.
"""

from __future__ import annotations

from typing import Annotated, Any

from setpoint.config.declare import Option, Range, declared, shown
from setpoint.config.service_options import ServiceOptions

SCHEDULE = "Scheduling"
MEMORY = "Memory and cache"
EXECUTION = "Execution"
LOGS = "Logs"
PARALLEL = "Parallelism"
COMPATIBILITY = "Accepted without effect"

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


class Options(ServiceOptions, frozen=True, kw_only=True):
    """What the user asked for: how the engine works, after what it serves; None and "auto" mean
    "choose for me" until ``resolve`` has chosen."""

    # -- Scheduling
    workload: Annotated[
        str | None,
        Option(
            SCHEDULE,
            "Kind of traffic: takes the defaults that SGLang's tuning guide recommends for it, as"
            " far as they suit this machine. Every explicit option wins; each value is logged with"
            " its reason.",
            choices=("online", "offline", "long-context", "multi-turn"),
        ),
    ] = None
    schedule_policy: Annotated[
        str,
        Option(
            SCHEDULE,
            "Order of the waiting queue: fcfs first come first served; lpm longest cached prefix"
            " first; dfs-weight along the cached tree, the subtree most requests wait for first;"
            " hrrn longest waited for its length first; shortest-prefill-first fewest uncached"
            " tokens first; lof longest output limit first; random; routing-key the key most"
            " running requests have first. priority means fcfs with --enable-priority-scheduling."
            " lpm and hrrn act as fcfs while more than 128 requests wait.",
            choices=(
                "fcfs",
                "lpm",
                "dfs-weight",
                "hrrn",
                "shortest-prefill-first",
                "lof",
                "random",
                "routing-key",
                "priority",
            ),
            tunable=("fcfs", "lpm", "dfs-weight", "hrrn"),
            live=True,
        ),
    ] = "fcfs"
    enable_priority_scheduling: Annotated[
        bool,
        Option(
            SCHEDULE,
            "Requests with a higher priority go first, under fcfs and lof; running ones of much"
            " lower priority make room.",
        ),
    ] = False
    schedule_low_priority_values_first: Annotated[
        bool, Option(SCHEDULE, "Requests with lower priority values go first.")
    ] = False
    default_priority_value: Annotated[
        int | None,
        Option(
            SCHEDULE, "Priority of requests that have none; if not given, they go last.", live=True
        ),
    ] = None
    priority_scheduling_preemption_threshold: Annotated[
        int,
        Option(
            SCHEDULE,
            "A running request makes room for one whose priority is better by more than this.",
            low=0,
            live=True,
        ),
    ] = 10
    disable_priority_preemption: Annotated[
        bool, Option(SCHEDULE, "Running requests never make room for those of higher priority.")
    ] = False
    abort_on_priority_when_disabled: Annotated[
        bool,
        Option(
            SCHEDULE,
            "Answer 503 to a request with a priority while priority scheduling is off, instead of"
            " ignoring the priority.",
        ),
    ] = False
    retraction_policy: Annotated[
        str,
        Option(
            SCHEDULE,
            "Which requests are retracted when the KV pool is full: length takes those with the"
            " fewest output tokens, priority the least urgent first (with"
            " --enable-priority-scheduling).",
            choices=("length", "priority"),
        ),
    ] = "length"
    prefill_decode_interval: Annotated[
        int | None,
        Option(
            SCHEDULE,
            "Decode steps between two prefill steps or chunks while requests decode; 0 lets prefill"
            " always go first. If not given, prefill goes first, but on a CPU without mixed chunks"
            " one decode step follows each step that reads only a piece of one prompt.",
            low=0,
            tunable=Range(0, 32),
            live=True,
        ),
    ] = None
    prefill_decode_interval_min_bs: Annotated[
        int,
        Option(
            SCHEDULE,
            "--prefill-decode-interval holds while at least so many requests decode.",
            low=0,
            live=True,
        ),
    ] = 0
    num_continuous_decode_steps: Annotated[
        int,
        Option(
            SCHEDULE,
            "Decode steps between two looks at the waiting queue.",
            low=1,
            tunable=Range(1, 16),
            live=True,
        ),
    ] = 1
    enable_prefill_delayer: Annotated[
        bool,
        Option(
            SCHEDULE,
            "While requests run, admit none until as many slots are free as the largest prefill"
            " batch so far took. Aligning the prefills of data-parallel ranks, its other use, has"
            " nothing to do here: there is one rank.",
            tunable=(False, True),
        ),
    ] = False
    prefill_delayer_max_delay_passes: Annotated[
        int,
        Option(
            SCHEDULE,
            "Maximum scheduling passes of such a wait, or of one by --min-free-slots-delay.",
            low=1,
            live=True,
        ),
    ] = 30
    prefill_delayer_max_delay_ms: Annotated[
        float | None,
        Option(
            SCHEDULE,
            "Maximum milliseconds of such a wait; 5000 if not given.",
            metavar="MS",
            low=0,
            live=True,
        ),
    ] = None
    prefill_delayer_token_usage_low_watermark: Annotated[
        float | None,
        Option(
            SCHEDULE,
            "Share of the KV pool in use below which --enable-prefill-delayer does not wait.",
            low=0,
            high=1,
            live=True,
        ),
    ] = None
    prefill_delayer_queue_min_ratio: Annotated[
        float | None,
        Option(
            SCHEDULE,
            "--enable-prefill-delayer also waits until so many requests per running one are queued,"
            " at most as many as the largest prefill batch had. Useful: 0.1 to 0.5.",
            low=0,
            live=True,
        ),
    ] = None
    min_free_slots_delay: Annotated[
        int | None,
        Option(
            SCHEDULE,
            "While requests run, admit none until so many slots are free, at most a sixth of all"
            " and 2 to 4 in any case. Off at 0 and 1, and with fewer than 8 slots.",
            low=0,
        ),
    ] = None
    schedule_conservativeness: Annotated[
        float,
        Option(
            SCHEDULE,
            "Scales the share of their output limit that running requests are expected to use."
            " Higher: fewer retractions, more queueing.",
            low=0,
            tunable=Range(0.05, 1.5, log=True),
            live=True,
        ),
    ] = 1.0
    max_running_requests: Annotated[
        int | None,
        Option(
            SCHEDULE,
            "Maximum requests running at once; if not given, it follows from the size of the KV"
            " pool.",
            low=1,
            tunable=Range(1, 4096, log=True),
        ),
    ] = None
    max_queued_requests: Annotated[
        int | None,
        Option(
            SCHEDULE,
            "Maximum requests waiting; further ones get 503. No limit if not given.",
            low=0,
            live=True,
            server_only=True,
        ),
    ] = None
    chunked_prefill_size: Annotated[
        int | None,
        Option(
            SCHEDULE,
            "Maximum prompt tokens computed in one step; longer prompts are split. -1 turns"
            " splitting off.",
            human=True,
            tunable=Range(128, 16384, log=True),
        ),
    ] = None
    max_prefill_tokens: Annotated[
        int,
        Option(
            SCHEDULE,
            "Prompt tokens admitted to one prefill batch; matters mainly without chunking.",
            low=1,
            human=True,
            tunable=Range(1024, 65536, log=True),
            live=True,
        ),
    ] = 16384
    prefill_max_requests: Annotated[
        int | None,
        Option(
            SCHEDULE,
            "Maximum requests in one prefill batch. No limit if not given.",
            low=1,
            tunable=Range(1, 256, log=True),
            live=True,
        ),
    ] = None
    enable_mixed_chunk: Annotated[
        bool,
        Option(
            SCHEDULE,
            "Add the decode rows to prefill steps instead of letting them wait.",
            tunable=(False, True),
        ),
    ] = False
    disable_overlap_schedule: Annotated[
        bool,
        Option(
            SCHEDULE,
            "Wait for each step's result before planning the next (on a CPU this is always so).",
        ),
    ] = False
    strict_accounting: Annotated[
        bool,
        Option(
            SCHEDULE,
            "Check after every step, not only when idle, that no cache page is lost or owned"
            " twice.",
        ),
    ] = False

    # -- Memory and cache
    mem_fraction_static: Annotated[
        float | None,
        Option(
            MEMORY,
            "Share of the available memory for weights and KV pool together, between 0 and 1. Raise"
            " it if there is no room for the pool, lower it if memory runs out while serving.",
            metavar="SHARE",
            tunable=Range(0.5, 0.95),
        ),
    ] = None
    max_total_tokens: Annotated[
        int | None,
        Option(
            MEMORY,
            "Upper bound of the KV pool, in tokens.",
            low=1,
            human=True,
            tunable=Range(4096, 16777216, log=True),
        ),
    ] = None
    page_size: Annotated[
        int, Option(MEMORY, "Tokens in a page of the KV pool.", low=1, tunable=(1, 16, 32, 64))
    ] = 1
    disable_radix_cache: Annotated[
        bool,
        Option(
            MEMORY,
            "Turn the prefix cache off: prefixes of finished requests are neither kept nor"
            " matched.",
        ),
    ] = False
    radix_eviction_policy: Annotated[
        str,
        Option(
            MEMORY,
            "What the prefix cache drops first: the least recently used (lru); the least often hit"
            " (lfu); what was hit less than twice (slru); what low-priority requests left"
            " (priority); tails of conversations whose next prefill stays within a budget without"
            " them (tlru). Among equals the least recently used.",
            choices=("lru", "lfu", "slru", "priority", "tlru"),
            tunable=("lru", "lfu", "slru"),
        ),
    ] = "lru"
    radix_eviction_policy_config: Annotated[
        str,
        Option(
            MEMORY,
            "JSON object with the policy's parameters: slru protected_threshold (hits, 2); tlru"
            " threshold (prompt tokens that may be recomputed per turn) and next_prompt_estimate"
            " (tokens a turn adds).",
            metavar="JSON",
        ),
    ] = "{}"

    # -- Execution
    device: Annotated[
        str,
        Option(
            EXECUTION,
            "Where the model runs; auto takes an NVIDIA GPU if there is one.",
            choices=("auto", "cpu", "cuda"),
        ),
    ] = "auto"
    attention_backend: Annotated[
        str,
        Option(
            EXECUTION,
            "Attention implementation: torch_ref is the definition and runs everywhere, cpu is C++"
            " for x86.",
            choices=("auto", "torch_ref", "cpu"),
        ),
    ] = "auto"
    enable_torch_compile: Annotated[
        bool,
        Option(
            EXECUTION,
            "Compile the torch operations of small steps, if there are any and it pays; start-up"
            " says what came of it.",
        ),
    ] = False
    torch_compile_max_bs: Annotated[
        int,
        Option(EXECUTION, "Maximum tokens of a step that --enable-torch-compile compiles.", low=1),
    ] = 32
    num_threads: Annotated[
        int | None,
        Option(
            EXECUTION,
            "Number of compute threads on a CPU; if not given, the number of cores that this"
            " process may use.",
            low=1,
            high=4096,
            tunable=Range(1, 256, log=True),
        ),
    ] = None
    disable_cuda_graph: Annotated[
        bool,
        Option(
            EXECUTION,
            "Run every step through the model's own code instead of replaying a captured one; on a"
            " CPU as well.",
        ),
    ] = False
    random_seed: Annotated[
        int | None,
        Option(EXECUTION, "Seed of everything random; drawn at start if not given.", low=0),
    ] = None

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
    log_requests: Annotated[
        bool, Option(LOGS, "Log every request when it arrives and when it is done.", live=True)
    ] = False
    log_requests_level: Annotated[
        int,
        Option(
            LOGS,
            "What --log-requests shows: 0 metadata, 1 and sampling parameters, 2 and shortened"
            " input and output, 3 everything.",
            choices=(0, 1, 2, 3),
            live=True,
        ),
    ] = 2
    decode_log_interval: Annotated[
        int, Option(LOGS, "Decode steps between two 'Decode batch' lines.", low=1, live=True)
    ] = 40

    # -- Parallelism
    tp_size: Annotated[
        int, Option(PARALLEL, "Tensor parallel ranks; only 1 so far.", choices=(1,))
    ] = 1
    dp_size: Annotated[
        int, Option(PARALLEL, "Data parallel replicas; only 1 so far.", choices=(1,))
    ] = 1
    pp_size: Annotated[int, Option(PARALLEL, "Pipeline stages; only 1 so far.", choices=(1,))] = 1
    ep_size: Annotated[
        int, Option(PARALLEL, "Expert parallel ranks; only 1 so far.", choices=(1,))
    ] = 1

    # -- Accepted without effect: in SGLang's tuning guides, so that their commands start
    cuda_graph_max_bs_decode: Annotated[
        int | None,
        Option(
            COMPATIBILITY,
            "Maximum requests of a decode step that is replayed from a graph.",
            low=0,
            no_effect="on a CPU every step of up to 512 tokens is replayed, on a GPU none is yet",
        ),
    ] = None
    enable_overlap_scheduler: Annotated[
        bool,
        Option(
            COMPATIBILITY,
            "Plan the next step while the device computes this one (of older guides).",
            no_effect="that is the default where the device allows it",
        ),
    ] = False
    enable_dp_attention: Annotated[
        bool,
        Option(
            COMPATIBILITY,
            "Data parallel attention of --dp-size ranks.",
            no_effect="there is one rank",
        ),
    ] = False
    enable_hierarchical_cache: Annotated[
        bool,
        Option(
            COMPATIBILITY,
            "Keep a larger second KV cache in host memory. Refused on a GPU.",
            no_effect=(
                "on a CPU the KV pool is in host memory already, and --max-total-tokens sets its"
                " size"
            ),
        ),
    ] = False
    hicache_ratio: Annotated[
        float | None,
        Option(
            COMPATIBILITY,
            "Size of that second cache, as a multiple of the first.",
            low=0,
            no_effect="there is no second cache",
        ),
    ] = None
    enable_metrics: Annotated[
        bool,
        Option(
            COMPATIBILITY,
            "Serve /metrics.",
            no_effect=(
                "this version has no /metrics yet; the log and /server_info have the main figures"
            ),
        ),
    ] = False
    trust_remote_code: Annotated[
        bool,
        Option(
            COMPATIBILITY,
            "Run Python code that comes with a checkpoint.",
            no_effect="Setpoint never runs such code",
        ),
    ] = False


OPTION_FIELDS = declared(Options, Option)


def server_args(options: Options) -> dict[str, Any]:
    """The options as ``/server_info`` shows them: every value, secrets masked."""
    return {field.name: shown(field, getattr(options, field.name)) for field in OPTION_FIELDS}
