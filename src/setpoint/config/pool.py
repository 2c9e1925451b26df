"""Settles what follows from the size of the KV pool, and builds the memory model of a resolved
configuration. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from setpoint.config.check import LEAST_POOL_TOKENS
from setpoint.config.decisions import Decision
from setpoint.config.groups.parallel import ParallelOptions
from setpoint.config.quantization import keeps_blocks
from setpoint.config.resolved import ResolvedConfig
from setpoint.core.errors import OutOfMemoryError
from setpoint.core.graph_sizes import NO_GRAPHS
from setpoint.core.model import ROUNDED, ModelSpec
from setpoint.planning.memory import MemoryModel, max_running_requests

CPU_KERNEL_DTYPES = ("bfloat16", "float32")
"""Dtypes that the C++ kernels compute in, and that oneDNN packs weights for."""

CPU_KV_DTYPES = (*CPU_KERNEL_DTYPES, "fp8_e4m3", "fp8_e5m2")
"""Dtypes of a KV cache that the C++ kernels read."""

INPUT_MARGIN = 5
"""Number of tokens by which a prompt must be shorter than the longest request
(docs/sglang/options.md#pool-limits)."""


@dataclass(slots=True, frozen=True)
class PoolConfig:
    """The limits that depend on the pool; the ready line and ``/server_info`` show them."""

    max_total_num_tokens: int
    max_running_requests: int
    max_req_len: int
    max_req_input_len: int
    min_free_slots: int | None
    """``--min-free-slots-delay``, limited by the number of slots; None turns the delay off."""
    decisions: tuple[Decision, ...]
    """These replace decisions about the same fields that were made before the pool was sized."""


def memory_model(
    config: ResolvedConfig,
    model: ModelSpec,
    *,
    attention: str | None = None,
    model_impl: str | None = None,
) -> MemoryModel:
    """The memory model of this configuration, before or after the weights are loaded; with several
    nodes, of one of them.

    attention, model_impl: the backend and the model code that the engine chose; None if it has not
    chosen yet, in which case the expected choice is assumed.
    """
    options = config.options
    on_cpu = options.execution.device == "cpu"
    kernels = on_cpu and options.model.dtype in CPU_KERNEL_DTYPES
    if attention is None:
        kinds = options.execution.attention_backend, options.execution.decode_attention_backend
        attention = " and ".join(kind for kind in kinds if kind not in (None, "auto")) or "auto"
    if attention == "auto":
        attention = "torch_ref"
        if not on_cpu:
            attention = "triton"
        elif kernels and options.model.kv_cache_dtype in CPU_KV_DTYPES:
            attention = "cpu"
    return MemoryModel(
        spec=_share_of_memory(
            model.with_expert_copies(options.experts.ep_num_redundant_experts),
            options.parallel,
            options.execution.device,
        ),
        device=options.execution.device,
        dtype_bytes=config.dtype_bytes,
        quantization=options.model.quantization,
        blocks_kept=keeps_blocks(options, model),
        kv_element_bytes=config.kv_element_bytes,
        head_copied=(kernels or options.model.quantization in ROUNDED) and model.pooling is None,
        reference_attention="torch_ref" in attention,  # the engine may have two backends
        page_size=config.page_size,
        context_len=config.context_len,
        step_tokens=config.step_tokens,
        mem_fraction_static=config.mem_fraction_static,
        fraction_given=config.fraction_given,
        max_total_tokens=options.memory.max_total_tokens,
        requested_slots=options.scheduling.max_running_requests,
        captured=attention == "cpu"
        and not options.graphs.disable_cuda_graph
        and (model_impl or options.model.model_impl) != "transformers",
        graph_sizes=NO_GRAPHS if attention == "torch_ref" else config.graph_sizes,
    )


def _share_of_memory(spec: ModelSpec, parallel: ParallelOptions, device: str) -> ModelSpec:
    """The model as the memory of one node sees it or, on GPUs, that of one rank: with the largest
    part that one of them gets."""
    if parallel.enable_dp_attention:
        return spec.share_of_experts(parallel.dp_size)
    memories = parallel.nnodes if device == "cpu" else parallel.tp_size
    if memories == 1:
        return spec
    heads = spec.num_heads if spec.latent else spec.num_kv_heads
    size = parallel.tp_size
    ends = [heads * rank // size for rank in range(0, size + 1, size // memories)]
    most = max(end - begin for begin, end in pairwise(ends))

    def part(number: int) -> int:
        return -(-number * most // heads)

    blocks = spec.blocks
    return replace(
        spec,
        num_heads=part(spec.num_heads),
        # Every rank caches the whole latent vector.
        num_kv_heads=size // memories if spec.latent else most,
        intermediate_size=part(spec.intermediate_size),
        mixture=None
        if spec.mixture is None
        else replace(
            spec.mixture,
            size=part(spec.mixture.size),
            shared_size=part(spec.mixture.shared_size),
        ),
        num_parameters=part(spec.num_parameters),
        blocks=None
        if blocks is None
        else replace(
            blocks,
            num_parameters=part(blocks.num_parameters),
            num_bytes=part(blocks.num_bytes),
            held_bytes=part(blocks.held_bytes),
            embedding_bytes=part(blocks.embedding_bytes),
            experts_parameters=part(blocks.experts_parameters),
            experts_bytes=part(blocks.experts_bytes),
        ),
    )


def resolve_pool(config: ResolvedConfig, pool_tokens: int, *, limited_by: str = "") -> PoolConfig:
    """Settle what depends on the size of the pool, which has ``pool_tokens`` usable tokens
    (docs/sglang/options.md#pool-limits).

    limited_by: the memory plan's words for why the pool is not larger. Raises OutOfMemoryError if
    no request fits.
    """
    max_req_len = min(config.context_len, pool_tokens) - 1
    max_input = max_req_len - INPUT_MARGIN
    if min(config.context_len, pool_tokens) < LEAST_POOL_TOKENS:
        raise OutOfMemoryError(
            f"a KV pool of {pool_tokens} tokens is too small for any request: even a prompt of"
            f" one token needs {LEAST_POOL_TOKENS}. Raise --max-total-tokens or"
            " --mem-fraction-static, or free memory."
        )
    asked = config.options.scheduling.max_running_requests
    running = max_running_requests(pool_tokens, config.context_len, asked)
    free_slots = _min_free_slots(config.options.scheduling.min_free_slots_delay, running)
    return PoolConfig(
        max_total_num_tokens=pool_tokens,
        max_running_requests=running,
        max_req_len=max_req_len,
        max_req_input_len=max_input,
        min_free_slots=free_slots,
        decisions=(
            _tokens(config, pool_tokens, limited_by),
            _running(config, pool_tokens, running),
            _length(config, pool_tokens, max_req_len),
            Decision(
                "max_req_input_len", max_input, f"max_req_len less a margin of {INPUT_MARGIN}"
            ),
            *_clipped_slots(config.options.scheduling.min_free_slots_delay, free_slots, running),
        ),
    )


def _tokens(config: ResolvedConfig, pool_tokens: int, limited_by: str) -> Decision:
    asked, page = config.options.memory.max_total_tokens, config.page_size
    why = f"limited by {limited_by}" if limited_by else "as allocated"
    short = asked is not None and pool_tokens < asked // page * page
    return Decision(
        "max_total_num_tokens",
        pool_tokens,
        f"{why}; --max-total-tokens {asked} does not fit" if short else why,
        warn=short,
    )


def _running(config: ResolvedConfig, pool_tokens: int, running: int) -> Decision:
    asked = config.options.scheduling.max_running_requests
    if asked is None:
        why = (
            f"by the pool of {pool_tokens} tokens and the context of {config.context_len}; at"
            " least 2048, and at most 4096 or one per two tokens"
        )
        return Decision("max_running_requests", running, why)
    if running < asked:
        why = (
            f"{asked} was asked for, but each request needs two tokens and the pool has"
            f" {pool_tokens}; enlarge the pool to run more"
        )
        return Decision("max_running_requests", running, why, warn=True)
    return next(
        decision for decision in config.decisions if decision.field == "max_running_requests"
    )


def _length(config: ResolvedConfig, pool_tokens: int, max_req_len: int) -> Decision:
    if pool_tokens < config.context_len:
        why = (
            f"the pool's {pool_tokens} tokens less one, short of the context of"
            f" {config.context_len}; enlarge it for longer requests"
        )
        return Decision("max_req_len", max_req_len, why, warn=True)
    return Decision("max_req_len", max_req_len, "the context length less one")


def _min_free_slots(asked: int | None, running: int) -> int | None:
    """The value within SGLang's limits: at most a sixth of the slots, and between 2 and 4. None
    turns the delay off: with fewer than 8 slots, or if one free slot is enough."""
    if asked is None or asked <= 1 or running < 8:
        return None
    return min(asked, 4, max(2, -(-running // 6)))


def _clipped_slots(asked: int | None, settled: int | None, running: int) -> list[Decision]:
    if asked is None or asked == settled:
        return []
    return [
        Decision(
            "min_free_slots_delay",
            settled,
            f"{asked} was asked for; the limit follows from {running} slots",
            warn=asked > 1,
        )
    ]
