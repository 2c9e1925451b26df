"""Loads an engine's model and sizes its memory, and logs both in SGLang's start-up lines."""

from __future__ import annotations

import logging
from collections.abc import Set
from dataclasses import asdict, dataclass

import torch

from setpoint.config.hardware import available_bytes
from setpoint.config.options import Options
from setpoint.config.pool import PoolConfig, memory_model, resolve_pool
from setpoint.config.resolved import ResolvedConfig
from setpoint.core.cachegroups import layout_summary
from setpoint.core.control import EngineFacts
from setpoint.core.errors import ConfigError
from setpoint.core.footprint import Footprint
from setpoint.core.limits import CAPTURED_TOKENS
from setpoint.core.model import ModelSpec
from setpoint.core.progress import report
from setpoint.core.records import Fallback, Observer
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.executor.compiling import compile_steps
from setpoint.engine.executor.tensor_parallel import OtherRanks
from setpoint.engine.kernels.device import (
    accelerator_name,
    check_device,
    claims_later,
    free_bytes,
)
from setpoint.engine.parallel.data_ranks import DataRanks
from setpoint.engine.parallel.group import ALONE
from setpoint.engine.parallel.split import cached_spec
from setpoint.engine.runner.model_runner import LoadReport, ModelRunner
from setpoint.launch.decision_log import log_decisions
from setpoint.observe.logline import FOR_FILES, FOR_TERMINALS, gib, ready_line
from setpoint.planning.memory import MemoryModel, MemoryPlan, activation_bytes

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class LoadedModel:
    """A model with its pool."""

    runner: ModelRunner
    pool: PoolConfig
    facts: EngineFacts
    """What the engine says of itself when it is ready, with the phases of its start until now."""


def load_engine(
    engine: EngineConfig,
    config: ResolvedConfig,
    observer: Observer,
    *,
    memory_bytes: int | None,
    is_standby: bool,
    others: OtherRanks | None = None,
    data: DataRanks | None = None,
) -> LoadedModel:
    """Load the weights, then size the pool from the memory that is left. The observer gets a record
    of everything that runs more slowly than it could. memory_bytes, is_standby: see ``EngineJob``.
    others, data: the ranks, and the engines, that load their parts meanwhile."""
    spec, options, device = engine.spec, config.options, engine.device
    check_device(torch.device(device))
    before = device_bytes(device)
    if memory_bytes is not None and device == "cpu":
        before = memory_bytes if is_standby else min(before, memory_bytes)
    logger.debug("Load weight begin. avail mem=%s GB", gib(before))
    report("loading the weights")
    group = ALONE if others is None else others.group
    runner = build_runner(engine, group, data)
    loaded = runner.report
    _check_promise(loaded, options)
    weight_bytes, num_sharing = loaded.weight_bytes, 1
    if others is not None:
        weight_bytes, before = others.wait_for_weights(weight_bytes, before)
        num_sharing = others.num_sharing
        _compare_levels({loaded.level, *others.levels})
    after = device_bytes(device)
    log_weights(runner, spec, after)
    own = runner.footprint(step_tokens=config.step_tokens, context_len=config.context_len)
    after = before - weight_bytes if is_standby else min(after, before - weight_bytes)
    cached, footprint = cached_spec(spec, group.size), own.of_ranks(num_sharing, weight_bytes)
    model = memory_model(config, cached, attention=loaded.attention, model_impl=loaded.model_impl)
    plan = model.plan(before, available_after_load=after, footprint=footprint)
    pool = resolve_pool(config, plan.pool_tokens, limited_by=plan.limited_by)
    log_decisions(pool.decisions)
    report("making room for the KV cache")
    _allocate(
        runner,
        others,
        num_pages=plan.num_pages,
        max_slots=pool.max_running_requests,
        context_len=config.context_len,
    )
    # A CPU's pages count as taken only when they are first written; the pool will be.
    left = max(min(device_bytes(device), after - plan.kv_bytes), 0)
    _log_memory(runner, plan, options, left)
    if device != "cpu":
        pool_bytes, graph_bytes = runner.pool.num_bytes, _graph_bytes(runner)
        log_planned(model, plan, footprint, pool_bytes=pool_bytes, graph_bytes=graph_bytes)
    _tell_fallbacks(runner, options, observer)
    _log_limits(
        runner, config, pool_tokens=plan.pool_tokens, slots=pool.max_running_requests, left=left
    )
    return LoadedModel(runner, pool, _facts(runner, pool, left))


def _check_promise(loaded: LoadReport, options: Options) -> None:
    """Raise ConfigError if rows were to have the same bits in every batch, and what runs does not
    promise it."""
    if not options.execution.enable_deterministic_inference:
        return
    what = ""
    if options.execution.device == "cpu":
        what = "" if loaded.level else "the C++ kernels do not run here"
    elif {loaded.ops, loaded.attention} != {"triton"}:
        reasons = [f"{fallback.what}: {fallback.why}" for fallback in loaded.fallbacks]
        what = f"the kernels in Triton do not run here ({'; '.join(reasons)})"
    if loaded.model_impl == "transformers":
        what = "the model runs on the transformers library's code"
    if what:
        raise ConfigError(
            "--enable-deterministic-inference cannot be promised: " + what + ", and torch's"
            " operations may round by the number of rows. Leave it out."
        )


def _facts(runner: ModelRunner, pool: PoolConfig, available_bytes: int) -> EngineFacts:
    report = runner.report
    return EngineFacts(
        accelerator=accelerator_name(runner.device),
        max_total_num_tokens=pool.max_total_num_tokens,
        max_running_requests=pool.max_running_requests,
        max_req_len=pool.max_req_len,
        max_req_input_len=pool.max_req_input_len,
        weight_bytes=report.weight_bytes,
        kv_bytes=runner.pool.num_bytes,
        available_bytes=available_bytes,
        weights=report.weights,
        model_impl=report.model_impl,
        kernels=report.ops,
        linear_layers=report.linear,
        attention=report.attention,
        kernel_level=report.level,
        kernel_choices=report.choices,
        kernels_emulated=report.emulated,
        decisions=[asdict(decision) for decision in pool.decisions],
        phases={
            "load_weight": report.load_seconds,
            "kv_cache_allocation": runner.allocate_seconds,
        },
    )


def _log_limits(
    runner: ModelRunner, config: ResolvedConfig, *, pool_tokens: int, slots: int, left: int
) -> None:
    """Log what fits and what limits it: SGLang's line, and the same in words for a terminal. left:
    bytes."""
    options = config.options
    logger.info(
        ready_line(
            max_total_num_tokens=pool_tokens,
            chunked_prefill_size=config.chunked_prefill_size,
            max_prefill_tokens=options.scheduling.max_prefill_tokens,
            max_running_requests=slots,
            context_len=config.context_len,
            device=options.execution.device,
            available_bytes=left,
        ),
        extra=FOR_FILES,
    )
    logger.info(
        "Memory: the weights take %s GB, and the KV cache up to %s GB for %s tokens; %s GB are"
        " left.",
        gib(runner.report.weight_bytes),
        gib(runner.pool.num_bytes),
        f"{pool_tokens:,}",
        gib(left),
        extra=FOR_TERMINALS,
    )
    logger.info(
        "Limits: %s tokens per request (--context-length), %s requests at a time"
        " (--max-running-requests).",
        f"{config.context_len:,}",
        f"{slots:,}",
        extra=FOR_TERMINALS,
    )


def _tell_fallbacks(runner: ModelRunner, options: Options, observer: Observer) -> None:
    for fallback in runner.report.fallbacks:
        observer.on(fallback)
    if runner.why_eager:
        how = "partly eagerly" if any(way.num_bytes for way in runner.ways) else "eagerly"
        observer.on(Fallback(f"steps run {how}", runner.why_eager))
    if options.execution.enable_torch_compile:
        not_compiled = compile_small_steps(runner, options)
        if not_compiled is not None:
            observer.on(not_compiled)


def _allocate(runner: ModelRunner, others: OtherRanks | None, **sizes: int) -> None:
    """``ModelRunner.allocate`` on all ranks."""
    if others is not None:
        others.allocate(**sizes)
    runner.allocate(**sizes)
    if others is not None:
        others.check()


def _compare_levels(levels: Set[str]) -> None:
    if len(levels) > 1:
        logger.warning(
            "The ranks' kernels are for different instruction sets (%s), so answers may differ in"
            " their last bits from those of one machine. SETPOINT_CPU_ISA sets it.",
            ", ".join(sorted(level or "torch's own" for level in levels)),
        )


def log_weights(runner: ModelRunner, spec: ModelSpec, available: int) -> None:
    """Log SGLang's line about this rank's weights."""
    loaded = runner.report
    logger.info(
        "Load weight end. elapsed=%.2f s, type=%s, avail mem=%s GB, mem usage=%s GB.",
        loaded.load_seconds,
        spec.architecture,
        gib(available),
        gib(loaded.weight_bytes),
        extra=FOR_FILES,
    )
    logger.debug(
        "Model: %s, kernels: %s, linear layers: %s, attention: %s, instruction set: %s",
        loaded.model_impl,
        loaded.ops,
        loaded.linear,
        loaded.attention,
        loaded.level or "torch's own",
    )
    logger.log(
        logging.INFO if spec.blocks or spec.quantised else logging.DEBUG,
        "Weights: %s",
        loaded.weights,
    )
    if loaded.cache_scales:
        logger.info("Scales of the KV cache: %s", loaded.cache_scales)
    if loaded.experts:
        logger.info("Experts: %s", loaded.experts)
    if loaded.choices:
        logger.debug("Fastest on this processor at level %s: %s.", loaded.level, loaded.choices)


MUCH_MORE = 1.15
"""A part of the memory that takes so many times what was planned is worth a warning."""

TAKEN = "; these are limits: memory is taken when tokens first fill it"
"""About a pool on a CPU, of which no page is touched at the start (decision 0004)."""


def _log_memory(runner: ModelRunner, plan: MemoryPlan, options: Options, available: int) -> None:
    captured = _graph_bytes(runner)
    if captured and options.execution.device == "cpu":
        logger.debug(
            "Steps of up to %d tokens are captured. mem usage=%s GB", CAPTURED_TOKENS, gib(captured)
        )
    layout = runner.pool.layout
    logger.info(
        "KV Cache is allocated. dtype: %s, #tokens: %d, %s%s",
        options.model.kv_cache_dtype,
        plan.pool_tokens,
        cache_sizes(runner.pool.num_bytes, is_latent=runner.spec.latent is not None),
        TAKEN if claims_later(runner.pool.device) else "",
        extra=FOR_FILES,
    )
    if len(layout.groups) > 1 or layout.groups[0].window is not None:
        logger.info(
            "KV cache groups: %s; %d pages of %d tokens of one group. #tokens counts sequences of"
            " the whole context; shorter ones take more of the pool per token.",
            layout_summary(layout),
            plan.num_pages,
            runner.page_size,
        )
    logger.debug("Memory pool end. avail mem=%s GB", gib(available))


def _graph_bytes(runner: ModelRunner) -> int:
    return sum(way.num_bytes for way in runner.ways)


def log_planned(
    model: MemoryModel,
    plan: MemoryPlan,
    footprint: Footprint,
    *,
    pool_bytes: int,
    graph_bytes: int,
) -> None:
    """Log what each part of a GPU's memory takes beside what the memory model had said before
    anything was measured. What takes much more is a warning: a plan of another server would be
    wrong too."""
    activations = activation_bytes(
        model.spec, num_tokens=footprint.step_tokens, dtype_bytes=model.dtype_bytes
    )
    for what, measured, planned in (
        ("The weights take", footprint.weights, model.weights()),
        (
            f"Activations of a step of {footprint.step_tokens} tokens take",
            footprint.activations,
            activations,
        ),
        ("The KV cache takes", pool_bytes, plan.kv_bytes),
        ("Graphs take", graph_bytes, plan.graphs_bytes),
    ):
        if measured is not None and (measured or planned):
            level = logging.WARNING if measured > MUCH_MORE * planned else logging.INFO
            logger.log(
                level, "%s %s GB of memory; %s GB were planned.", what, gib(measured), gib(planned)
            )


def cache_sizes(num_bytes: int, *, is_latent: bool) -> str:
    """The size of the KV cache in SGLang's words; latent attention has no K and V of their own."""
    if is_latent:
        return f"KV size: {gib(num_bytes)} GB"
    return f"K size: {gib(num_bytes / 2)} GB, V size: {gib(num_bytes / 2)} GB"


def compile_small_steps(runner: ModelRunner, options: Options) -> Fallback | None:
    """Apply ``--enable-torch-compile`` and log what was compiled, what was reused and what it
    gains. Returns what runs without it, and why."""
    wanted = options.execution.torch_compile_max_bs
    logger.info("torch.compile: steps of up to %d tokens; a first start may take a minute", wanted)
    report(f"compiling steps of up to {wanted} tokens with torch.compile")
    compiled = compile_steps(runner, wanted)
    if compiled.num_graphs:
        logger.info(
            "torch.compile: %d graphs in %.1f s, %d of them from the cache %s",
            compiled.num_graphs,
            compiled.seconds,
            compiled.num_reused,
            compiled.folder,
        )
        logger.info(
            "torch.compile: steps by number of tokens, without sampling: %s",
            "; ".join(map(str, compiled.durations)),
        )
    if not compiled.why_not_more:
        return None
    which = (
        f"steps of more than {compiled.max_tokens} tokens run"
        if compiled.max_tokens
        else "every step runs"
    )
    return Fallback(f"{which} without torch.compile", compiled.why_not_more)


def device_bytes(device: str) -> int:
    """Memory of the device that this process could take now."""
    if device == "cpu":
        return available_bytes()
    return int(free_bytes(torch.device(device)))
