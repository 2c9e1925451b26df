"""Settles everything that the user left open, with the reason for every value.

Pure: user + hardware + model -> ResolvedConfig. It does not look at the machine (``hardware``
does), and does not know how large the KV pool will be: ``pool`` settles what depends on that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from setpoint.config import sglang
from setpoint.config.backends import settle_attention, settle_determinism
from setpoint.config.check import LEAST_POOL_TOKENS, check_options
from setpoint.config.decisions import Book, Decision
from setpoint.config.devices import settle_gpus
from setpoint.config.disaggregation import check_handed_model, settle_disaggregation
from setpoint.config.dp_attention import check_its_model, own_chunk, settle_dp_attention
from setpoint.config.environment import EnvSettings
from setpoint.config.expert_ranks import check_experts
from setpoint.config.graphs import settle_graphs
from setpoint.config.groups.chat_formats import NONE, OPEN
from setpoint.config.groups.declare import flag_of
from setpoint.config.groups.events import publisher_config
from setpoint.config.groups.memory import eviction_parameters
from setpoint.config.groups.tiers import storage_config
from setpoint.config.hardware import Hardware
from setpoint.config.options import GROUP_OF, OPTION_FIELDS, Options
from setpoint.config.placement import Placement, RankPlacement, place_ranks
from setpoint.config.quantization import check_cache_scales, settle_quantization
from setpoint.config.resolved import DTYPE_BYTES, ResolvedConfig
from setpoint.config.workload import apply_profile
from setpoint.core.errors import ConfigError
from setpoint.core.graph_sizes import GraphSizes
from setpoint.core.model import ModelSpec
from setpoint.planning.memory import (
    CPU_MEM_FRACTION,
    GIB,
    auto_mem_fraction,
    format_bytes,
    graph_bytes,
)


def resolve(
    options: Options,
    hardware: Hardware,
    model: ModelSpec,
    *,
    given: Set[str] = frozenset(),
    found: Mapping[str, tuple[str, str]] | None = None,
    env: EnvSettings | None = None,
    drawn_seed: int = 0,
) -> ResolvedConfig:
    """Return the configuration in which every option has a value.

    given: names of the options that the user wrote (``commandline.parse``). found: option -> a
    value that the caller found for an option that the user left open, and the reason. drawn_seed:
    the seed to use if none is given; the caller draws it so that this function stays pure. Raises
    ConfigError for options that cannot be honoured.
    """
    check_options(options)
    env = env or EnvSettings()
    device = options.execution.device
    device = hardware.device if device == "auto" else device
    profile = apply_profile(options, hardware, device, given=given)
    options = profile.options
    book = Book(options, given, profile.reasons)
    for name, (value, why) in (found or {}).items():
        if book.get(name) == OPEN:  # the formats of a chat
            book.put(name, value, why, is_news=value != NONE)
        else:
            book.fill(name, value, why)
    device = settle_model(book, model, hardware, env)
    _check_ranks(options, model, device)
    _check_latent(options, model)
    check_handed_model(options, model)
    gpus = settle_gpus(book, hardware, device)
    placement = place_ranks(options, env, hardware, device=device)
    steps = settle_steps(book, hardware, model, device, placement)
    settle_rules(book, device, steps.chunk)
    book.fill("random_seed", drawn_seed, "drawn at start")
    book.fill("tokenizer_path", book.get("model_path"), "the model's own")
    book.fill("served_model_name", book.get("model_path"), "the model path")
    book.fill("log_level_http", options.logs.log_level, "as --log-level")
    notes = [*steps.decisions, *gpus, *about_the_model(book, model), *about_sglang_alone(given)]
    notes += [
        Decision(name, None, words, is_news=True)
        for name, (words, _) in profile.reasons.items()
        if name not in GROUP_OF
    ]
    return ResolvedConfig(
        options=options.replace(**book.values),
        env=env,
        decisions=(*book.decisions(), *notes),
        fraction_given=options.memory.mem_fraction_static is not None,
        graph_sizes=steps.graph_sizes,
        overlap_depth=steps.overlap_depth,
        decode_after_piece=steps.decode_after_piece,
        places=placement.places,
        storage=storage_config(options.tiers),
        events=publisher_config(options.events, num_ranks=options.parallel.dp_size),
        eviction_parameters=eviction_parameters(options.memory),
    )


def _check_latent(options: Options, model: ModelSpec) -> None:
    """Raise ConfigError for what latent attention does not have."""
    if model.latent and options.execution.enable_torch_compile:
        raise ConfigError(
            f"--enable-torch-compile does not work with the latent attention of"
            f" {model.architecture}; leave it out: steps of few tokens are captured without it."
        )


def _check_ranks(options: Options, model: ModelSpec, device: str) -> None:
    """Raise ConfigError if the model cannot be divided among the ranks."""
    check_experts(options, model)
    check_its_model(options, model, device)
    size, possible = options.parallel.ranks_per_engine, model.rank_counts
    if size == 1:
        return
    if model.whole_norms:
        raise ConfigError(
            f"--tp-size {size}: this model normalises all heads together, so its attention cannot"
            " be divided; it runs on one rank."
        )
    if size not in possible:
        raise ConfigError(
            f"--tp-size {size} cannot divide the {model.num_heads} attention heads of this model,"
            f" which share {model.num_kv_heads} heads of K and V; possible:"
            f" {', '.join(map(str, possible))}."
        )
    if options.execution.enable_torch_compile:
        raise ConfigError(
            "--enable-torch-compile cannot be combined with --tp-size, because compiled steps"
            " cannot wait for other ranks; leave one of them out."
        )


BODY_BYTES_PER_TOKEN = 16
MIN_BODY_BYTES = 4 << 20

_LONG_DTYPES = {"half": "float16", "float": "float32", "bf16": "bfloat16", "fp32": "float32"}


def settle_model(book: Book, model: ModelSpec, hardware: Hardware, env: EnvSettings) -> str:
    """Settle the options that depend on the model, and return the device. Raises ConfigError for
    options that the model cannot honour."""
    device = _device(book, hardware)
    dtype = _dtype(book, model, device)
    _model_impl(book)
    settle_quantization(book, model, device, dtype)
    _kv_cache_dtype(book, dtype)
    check_cache_scales(book.options, model)
    _context_length(book, model, env)
    _max_body_bytes(book)
    return device


def _device(book: Book, hardware: Hardware) -> str:
    if book.options.execution.device != "auto":
        return book.options.execution.device
    if hardware.device == "cuda":
        return book.put("device", "cuda", "an NVIDIA GPU is visible and torch can drive it")
    return book.put("device", "cpu", "no NVIDIA GPU that torch can drive")


def _model_impl(book: Book) -> None:
    asked = book.options.model.model_impl
    if asked == "sglang":
        book.put("model_impl", "setpoint", "given as sglang")
    elif asked == "auto":
        book.put(
            "model_impl",
            asked,
            "Setpoint's own code if it has the model's architecture, otherwise that of the"
            " transformers library; the log names the one in use",
        )


def _dtype(book: Book, model: ModelSpec, device: str) -> str:
    asked = book.options.model.dtype
    if asked in _LONG_DTYPES:
        return book.put("dtype", _LONG_DTYPES[asked], f"given as {asked}")
    if asked != "auto":
        return asked
    if model.dtype == "float32":
        return book.put(
            "dtype",
            "bfloat16",
            "half the memory traffic of the checkpoint's float32; --dtype float32 keeps float32",
        )
    if model.dtype == "float16" and device == "cpu":
        return book.put("dtype", "bfloat16", "the checkpoint is float16, which CPUs compute slowly")
    if model.dtype not in DTYPE_BYTES:
        return book.put(
            "dtype", "bfloat16", f"the checkpoint is {model.dtype}, in which nothing computes"
        )
    return book.put("dtype", model.dtype, "the checkpoint's own")


def _kv_cache_dtype(book: Book, dtype: str) -> None:
    asked = book.options.model.kv_cache_dtype
    if asked == "auto":
        book.put("kv_cache_dtype", dtype, "the same as dtype")
    elif asked in _LONG_DTYPES:
        book.put("kv_cache_dtype", _LONG_DTYPES[asked], f"given as {asked}")


def _context_length(book: Book, model: ModelSpec, env: EnvSettings) -> None:
    asked = book.options.model.context_length
    if asked is None:
        book.put("context_length", model.context_len, "the model's own limit")
    elif asked > model.context_len:
        if not env.allow_longer_context:
            raise ConfigError(
                f"--context-length {asked} is more than the {model.context_len} tokens for which"
                " this model was made; lower it, or set"
                " SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 if you know that the model works"
                " with longer contexts."
            )
        book.put(
            "context_length", asked, f"given, beyond the model's own {model.context_len}", warn=True
        )


def _max_body_bytes(book: Book) -> None:
    """Settle the largest body so that it has room for every token of the context: a token takes 4
    to 5 bytes as prose, up to 8 as an id, and 6 to 12 as a character that the client's JSON library
    escapes."""
    of_a_prompt = BODY_BYTES_PER_TOKEN * book.get("context_length")
    if of_a_prompt > MIN_BODY_BYTES:
        book.fill(
            "max_body_bytes",
            of_a_prompt,
            f"{BODY_BYTES_PER_TOKEN} bytes for each token of the context",
        )
    else:
        book.fill(
            "max_body_bytes",
            MIN_BODY_BYTES,
            "holds a prompt of the whole context, and long lists of prompts",
        )


def about_the_model(book: Book, model: ModelSpec) -> Iterator[Decision]:
    """Yields the decisions about properties of the model that no option covers."""
    if model.rope_by_context:
        why = (
            "sequences share the keys in the cache, so the positions of every sequence are"
            " rotated for this length; a shorter context length suits short sequences better"
        )
        yield Decision("rope_context_length", book.get("context_length"), why, is_news=True)
    if model.wrapper:
        why = f"{model.wrapper} accepts more than text; only its text model is loaded"
        yield Decision("language_model_only", model.architecture, why, is_news=True)
    if model.pooling is not None:
        yield Decision("embedding_pooling", model.pooling.kind, model.pooling.why, is_news=True)
        yield Decision(
            "embedding_normalize", model.pooling.normalize, model.pooling.why, is_news=True
        )


_NEEDS = {
    "schedule_low_priority_values_first": ("enable_priority_scheduling",),
    "default_priority_value": ("enable_priority_scheduling",),
    "priority_scheduling_preemption_threshold": ("enable_priority_scheduling",),
    "disable_priority_preemption": ("enable_priority_scheduling",),
    "prefill_decode_interval_min_bs": ("prefill_decode_interval",),
    "prefill_delayer_token_usage_low_watermark": ("enable_prefill_delayer",),
    "prefill_delayer_queue_min_ratio": ("enable_prefill_delayer",),
    "prefill_delayer_max_delay_passes": ("enable_prefill_delayer", "min_free_slots_delay"),
    "prefill_delayer_max_delay_ms": ("enable_prefill_delayer", "min_free_slots_delay"),
    "torch_compile_max_bs": ("enable_torch_compile",),
}
"""Option -> options of which at least one must be on for it to have an effect."""


def settle_rules(book: Book, device: str, chunk: int) -> None:
    """Settle the options about scheduling and the cache. Raises ConfigError for an option that this
    version cannot honour."""
    settle_dp_attention(book)
    settle_disaggregation(book)
    _scheduling(book, chunk)
    _eviction(book)
    _without_effect(book, device)


def _scheduling(book: Book, chunk: int) -> None:
    options = book.options
    policy = options.scheduling.schedule_policy
    if options.memory.disable_radix_cache and policy in ("lpm", "dfs-weight", "hrrn"):
        book.put(
            "schedule_policy",
            "fcfs",
            f"{policy} sorts by cached prefixes, and with --disable-radix-cache there are none",
            warn=True,
        )
    if policy == "priority":
        book.put("schedule_policy", "fcfs", "priority is fcfs with priority scheduling")
        book.put("enable_priority_scheduling", True, "--schedule-policy priority")
    for name, owners in _NEEDS.items():
        if book.changed(name) and not any(map(book.get, owners)):
            flags = " or ".join(flag_of(owner) for owner in owners)
            book.put(name, options.get(name), f"given, without effect: needs {flags}", warn=True)
    if (
        book.get("enable_priority_scheduling")
        and options.scheduling.abort_on_priority_when_disabled
    ):
        book.put(
            "abort_on_priority_when_disabled",
            True,
            "given, without effect: priority scheduling is on",
            warn=True,
        )
    if options.scheduling.enable_mixed_chunk and chunk <= 0:
        book.put(
            "enable_mixed_chunk",
            False,
            "--chunked-prefill-size turns chunks off, so there are none to mix decode tokens with",
            warn=True,
        )


def _eviction(book: Book) -> None:
    policy, parameters = (
        book.options.memory.radix_eviction_policy,
        eviction_parameters(book.options.memory),
    )
    if policy != "lru" and book.options.memory.disable_radix_cache:
        book.put(
            "radix_eviction_policy",
            policy,
            "given, without effect: with --disable-radix-cache there is nothing to evict",
            warn=True,
        )
    elif policy == "priority" and not book.get("enable_priority_scheduling"):
        why = (
            "given, but without --enable-priority-scheduling all requests are equal; it acts as"
            " lru, and evicts outputs before prompts"
        )
        book.put("radix_eviction_policy", policy, why, warn=True)
    elif policy == "tlru" and parameters["threshold"] <= parameters["next_prompt_estimate"]:
        why = (
            "given, but acts as lru: the next prompt alone is expected to reach the threshold,"
            " so no cached token may be evicted early"
        )
        book.put("radix_eviction_policy", policy, why, warn=True)


NO_HOST_TIER = (
    "on a CPU the KV pool is in host memory already, and --max-total-tokens sets its size"
)
"""Why there is no host tier on a CPU."""


def _without_effect(book: Book, device: str) -> None:
    tiers = book.options.tiers
    if device == "cpu":
        wanted, advice = ["hicache_ratio", "hicache_size"], ""
        if tiers.hicache_storage_backend is None:
            wanted.insert(0, "enable_hierarchical_cache")
            advice = "; --hicache-storage-backend file keeps prefixes beyond it"
        for name in wanted:
            if book.changed(name):
                why = f"given, without effect: {NO_HOST_TIER}{advice}"
                book.put(name, book.get(name), why, warn=True)
    for field in OPTION_FIELDS:
        if field.about.no_effect and book.changed(field.name):
            book.put(
                field.name,
                book.get(field.name),
                f"given, without effect: {field.about.no_effect}",
                warn=True,
            )


def about_sglang_alone(given: Set[str]) -> Iterator[Decision]:
    """Yields a decision about the given options that only SGLang has; all of them ask for SGLang's
    defaults (``commandline``)."""
    for name in sorted(given):
        default = sglang.default(name)
        if default is not None and name not in GROUP_OF:
            yield Decision(
                name,
                default,
                "given; it is SGLang's default and the only behaviour of this version",
                is_news=True,
            )


CPU_CHUNK = 512
"""Prompt tokens per step: the fastest size measured, 4 % faster than 2048, and the first requests
of a burst are answered sooner (docs/notebook.md)."""
GPU_CHUNKS = ((20, 2048), (60, 4096), (160, 8192))
"""Pairs (GiB, tokens): with less GPU memory than this, a prefill step has this many tokens. With
more than all of them, 16384 (docs/sglang/options.md#prefill-step)."""


@dataclass(slots=True, frozen=True)
class SettledValues:
    """Settled values that other functions need and that are not the value of any option."""

    chunk: int
    """Prompt tokens of a step; -1 if prompts are not split."""
    graph_sizes: GraphSizes
    overlap_depth: int
    decode_after_piece: int
    decisions: tuple[Decision, ...]
    """The decisions about ``overlap_depth``, ``decode_after_piece`` and the placement of ranks."""


def settle_steps(
    book: Book, hardware: Hardware, model: ModelSpec, device: str, placement: Placement
) -> SettledValues:
    """Settle the options that depend on the machine. Raises ConfigError for options that the
    machine cannot honour."""
    _page_size(book, device)
    chunk = own_chunk(book, _chunked_prefill_size(book, hardware, device))
    step_tokens = chunk if chunk > 0 else book.options.scheduling.max_prefill_tokens
    settle_attention(book, device)
    sizes = settle_graphs(book, hardware, model, device, step_tokens=step_tokens)
    _mem_fraction(book, hardware, device, step_tokens=step_tokens, sizes=sizes)
    settle_determinism(book, device)
    _num_threads(book, hardware, placement)
    depth, why_depth = _overlap_depth(book.options, device)
    piece, why_piece = _decode_after_piece(book, device, chunk)
    decisions = (
        Decision("overlap_depth", depth, why_depth),
        Decision("decode_after_piece", piece, why_piece),
        placement.decision,
    )
    return SettledValues(chunk, sizes, depth, piece, decisions)


GPU_PAGES = (16, 8, 4, 2, 1)
"""Tokens of a page on a GPU, best first."""


def _page_size(book: Book, device: str) -> None:
    if device == "cpu":
        book.fill("page_size", 1, "a prefix matches up to its last token")
        return
    chunk, total = book.get("chunked_prefill_size"), book.get("max_total_tokens")
    fits = [
        page
        for page in GPU_PAGES
        if not max(chunk or 0, 0) % page
        and (total is None or total // page * page >= LEAST_POOL_TOKENS)
    ]
    why = (
        "a GPU holds the page tables of all slots, which pages of one token would make as large as"
        " the token ids: 2.1 GB for 4,096 slots of 131,072 tokens"
    )
    if fits[0] < GPU_PAGES[0]:
        why += "; smaller, for whole pages in --chunked-prefill-size and --max-total-tokens"
    book.fill("page_size", fits[0], why)


def _chunked_prefill_size(book: Book, hardware: Hardware, device: str) -> int:
    asked, page = book.options.scheduling.chunked_prefill_size, book.get("page_size")
    if asked is not None:
        return (
            asked
            if asked > 0
            else book.put("chunked_prefill_size", -1, "given: prompts are not split")
        )
    if device == "cpu":
        size, why = (
            CPU_CHUNK,
            "the fastest size measured on a CPU, where 256 tokens already keep the matrix"
            " products busy",
        )
    elif hardware.gpu_bytes is None:
        size, why = 4096, "the size of the GPU's memory is not known"
    else:
        size = next(
            (tokens for below, tokens in GPU_CHUNKS if hardware.gpu_bytes < below * GIB), 16384
        )
        why = f"chosen for a GPU with {format_bytes(hardware.gpu_bytes)}"
    if size % page:
        size, why = max(size // page, 1) * page, f"{why}, in whole pages"
    return book.put("chunked_prefill_size", size, why)


def _decode_after_piece(book: Book, device: str, chunk: int) -> tuple[int, str]:
    if book.options.scheduling.prefill_decode_interval is not None:
        return 0, "--prefill-decode-interval is given"
    book.put("prefill_decode_interval", 0, "prefill goes first")
    if device != "cpu":
        return 0, "a GPU computes a long prompt before the pause is noticeable"
    if book.options.scheduling.enable_mixed_chunk and chunk > 0:
        return (
            0,
            (
                "every chunk of a prompt computes a token for each running request anyway"
                " (--enable-mixed-chunk)"
            ),
        )
    return (
        1,
        (
            "a chunk takes long on a CPU; without a decode step between the chunks of a long"
            " prompt, no stream would get a token until the prompt is done"
        ),
    )


def _mem_fraction(
    book: Book, hardware: Hardware, device: str, *, step_tokens: int, sizes: GraphSizes
) -> None:
    if device == "cpu":
        book.fill(
            "mem_fraction_static",
            CPU_MEM_FRACTION,
            "for weights and KV pool; the rest is for the workspace of a step and for the machine",
        )
    elif hardware.gpu_bytes is None:
        book.fill("mem_fraction_static", 0.95, "the size of the GPU's memory is not known")
    else:
        graphs = graph_bytes(sizes)
        value = auto_mem_fraction(hardware.gpu_bytes, step_tokens=step_tokens, graphs_bytes=graphs)
        if value <= 0:
            raise ConfigError(
                f"a GPU of {format_bytes(hardware.gpu_bytes)} has no room for steps of"
                f" {step_tokens} tokens and for {format_bytes(graphs)} of graphs; lower"
                f" {_cause_of_steps(book, step_tokens)} or {_cause_of_graphs(book)}, or give"
                " --mem-fraction-static."
            )
        book.fill(
            "mem_fraction_static",
            value,
            f"steps of {step_tokens} tokens and {format_bytes(graphs)} of graphs leave this share"
            f" of {format_bytes(hardware.gpu_bytes)}",
        )


def _cause_of_steps(book: Book, step_tokens: int) -> str:
    """The option that made the largest step so large."""
    if book.options.scheduling.chunked_prefill_size is None and step_tokens == book.get(
        "page_size"
    ):
        return "--page-size"  # a chunk has at least one page
    return "--chunked-prefill-size (without chunking --max-prefill-tokens)"


def _cause_of_graphs(book: Book) -> str:
    """The option that says how large graphs of decode steps become."""
    listed = book.options.graphs.cuda_graph_bs_decode
    return "--cuda-graph-bs-decode" if listed else "--cuda-graph-max-bs-decode"


def _num_threads(book: Book, hardware: Hardware, placement: Placement) -> None:
    if placement.places:
        _threads_of_places(book, placement.places)
        return
    asked, ranks = book.options.execution.num_threads, book.options.parallel.ranks_per_node
    cores = max(hardware.num_cores // ranks, 1)
    why = "the cores that this process may use, by affinity and cgroup quota"
    if hardware.num_engines > 1:
        why += f", divided by {hardware.divided_by} {hardware.num_engines}"
    if ranks > 1:
        why += f", divided by the {ranks} ranks on this machine"
    book.fill("num_threads", cores, why)
    threads = (asked or cores) * ranks
    if threads > hardware.num_cores:
        each = f" in each of {ranks} ranks" if ranks > 1 else ""
        book.put(
            "num_threads",
            asked or cores,
            f"{why if asked is None else 'given'}, but {threads // ranks} threads{each} have only"
            f" {hardware.num_cores} cores, so threads will wait for each other",
            warn=True,
        )


def _threads_of_places(book: Book, places: Sequence[RankPlacement]) -> None:
    asked, numbers = book.options.execution.num_threads, [each.num_threads for each in places]
    why = "the cores of a rank (placement), as far as the cgroup's quota goes"
    if min(numbers) < max(numbers):
        why = f"{why}; the ranks have {', '.join(map(str, numbers))}"
    book.fill("num_threads", numbers[0], why)
    cores = min(len(place.cpus) for place in places)
    if asked is not None and asked > cores:
        book.put(
            "num_threads",
            asked,
            f"given, but a rank has only {cores} cores, so threads will wait for each other",
            warn=True,
        )


def _overlap_depth(options: Options, device: str) -> tuple[int, str]:
    if device == "cpu":
        return 0, "on a CPU, planning ahead would take cores from the running step"
    if options.scheduling.disable_overlap_schedule:
        return 0, "--disable-overlap-schedule"
    return 1, "the next step is planned while the GPU computes this one"
