"""The engine process: ``python -m setpoint.launch.child LINK`` with an EngineJob on its standard
input; LINK is the descriptor of its end of the link, which it inherits.

It loads the model, sizes the memory, sends Ready, and runs the scheduler's loop until Shutdown. The
parent starts it before it knows the configuration, so that importing torch overlaps with finding
the model.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import psutil

from setpoint.config.groups.events import publisher_config
from setpoint.config.pool import PoolConfig
from setpoint.core.control import EngineFacts, ExpertLoads, MemoryUsage, TierState
from setpoint.core.errors import CheckpointError, ConfigError, SetpointError
from setpoint.core.grammar import GrammarFactory
from setpoint.core.messages import Failed, Ready, Starting
from setpoint.core.operations import Operator
from setpoint.core.progress import report, reported_to
from setpoint.core.records import Observer
from setpoint.engine.executor.engine_operations import EngineOperator
from setpoint.engine.executor.expert_balancing import ExpertBalancer
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint.engine.executor.tensor_parallel import (
    OtherRanks,
    TensorParallelExecutor,
    TensorParallelOperator,
)
from setpoint.engine.kernels.device import accelerator_name
from setpoint.engine.parallel.data_ranks import DataRanks
from setpoint.engine.parallel.group import GroupLost
from setpoint.engine.parallel.shared_tokens import SharedMemoryDataRanks
from setpoint.engine.runner.model_runner import ModelRunner
from setpoint.ipc.sockets import EngineSocket
from setpoint.launch.child.binding import bound
from setpoint.launch.child.cache_tiers import CacheTiers, noted_weights, open_tiers
from setpoint.launch.child.disaggregation import RenewingOperator, Sides, open_sides
from setpoint.launch.child.grammar_threads import GrammarThreads
from setpoint.launch.child.grammars import engine_grammars
from setpoint.launch.child.loading import device_bytes, load_engine
from setpoint.launch.child.low_priority import at_low_priority
from setpoint.launch.child.mapping import (
    cache_config,
    engine_config,
    recording_config,
    work_model,
)
from setpoint.launch.child.rank_group import other_ranks
from setpoint.launch.child.recognition import WatchedOperator
from setpoint.launch.deadline import RANK_LOST, leave
from setpoint.launch.heartbeat import Heartbeat, write_stacks_when_asked
from setpoint.launch.job import EngineJob, decode_job, encode_job
from setpoint.launch.lockstep_memory import bell_of, mapped, ring
from setpoint.launch.ranks import RankProcesses, start_ranks
from setpoint.launch.settings import live_settings, scheduler_config
from setpoint.observe.logline import setup_logging
from setpoint.observe.readers import EngineReaders
from setpoint.observe.tee import Tee
from setpoint.recording.writer import RecordingWriter, start_recording
from setpoint.scheduler.cache.block_news import BlockNews
from setpoint.scheduler.cache.manager import CacheConfig, KVCache
from setpoint.scheduler.cache.news import CacheNews
from setpoint.scheduler.loop import Loop
from setpoint.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

IMPORTED_AT = time.perf_counter()
IDLE_LOOKS = 4
LOOK_EVERY_S = 0.25
"""An engine that is idle at so many looks in a row, so far apart, prepares for grammars. That holds
the interpreter's lock, for a second with 128,000 tokens: it would delay the start, and every stream
that runs."""

WORDS_S = 0.5
"""How long an engine whose exchange has failed waits for the reason: that a rank has gone."""


class WallClock:
    def now(self) -> float:
        return time.monotonic()


def main(ranks: RankProcesses | None, inherited: Sequence[int]) -> int:
    """Run the engine as a child; returns the exit code. The parent has blocked SIGINT and SIGTERM
    for this process: they may reach the whole process group, but the parent ends the engine in
    order. ranks: the other ranks of its model. inherited: see ``run``.
    """
    line = sys.stdin.buffer.readline()
    if not line:
        return 1  # the parent ended before it sent a job, and has reported why
    threading.Thread(target=end_with_parent, daemon=True).start()
    return run(decode_job(line), int(sys.argv[1]), ranks, inherited)


def run(
    job: EngineJob,
    link: int,
    ranks: RankProcesses | None = None,
    inherited: Sequence[int] = (),
) -> int:
    """Make this process the engine of a job; returns exit code 0 after Shutdown. link: the
    descriptor of its end of the link. ranks: the other ranks, if they have been started already.
    inherited: what it shares with the engines that compute in step with it (``step_memory``). A
    start that fails sends the parent a Failed message first."""
    faulthandler.enable()  # native code that crashes: the log has the stack of every thread
    own = job.rank or 0
    name = f" TP{own if inherited else 0}"
    name = name if job.rank is None else f" DP{own}{name}"
    if job.weights_folder:  # of one of several models
        name += f" {job.config.options.model.served_model_name}"
    setup_logging(job.config.options.logs.log_level, rank=name, milliseconds=job.config.env.log_ms)
    socket = EngineSocket(link, bell_of(inherited, own) if inherited else None)
    num_ranks = job.config.options.parallel.ranks_per_node
    if ranks is None and num_ranks > 1:
        ranks = start_ranks(range(1, num_ranks))
    with ExitStack() as at_end:
        at_end.callback(socket.close)
        if ranks is not None:
            at_end.callback(ranks.end)
            ranks.hand_over(encode_job(job))
        job = bound(job, 0)
        try:
            data = _data_ranks(job, inherited) if inherited else None
            try:
                with reported_to(lambda doing: socket.send(Starting(doing))):
                    loop = _build(job, socket, at_end, ranks, data)
            except SetpointError as error:
                socket.send(Failed(str(error), isinstance(error, CheckpointError | ConfigError)))
                return 1
            loop.run()
            if data is not None:
                data.leave()
        except GroupLost as error:
            time.sleep(WORDS_S)
            logger.error("An exchange with the other ranks failed: %s. The engine ends.", error)
            leave(RANK_LOST)  # the other ranks may wait for this one, and would be waited for
    return 0


def _data_ranks(job: EngineJob, inherited: Sequence[int]) -> SharedMemoryDataRanks:
    rank, size = job.rank or 0, job.config.options.parallel.dp_size
    return SharedMemoryDataRanks(mapped(inherited), rank, size, partial(ring, inherited, rank))


def _build(
    job: EngineJob,
    socket: EngineSocket,
    at_end: ExitStack,
    ranks: RankProcesses | None,
    data: SharedMemoryDataRanks | None,
) -> Loop:
    config, spec = job.config, job.spec
    waited, clock = time.perf_counter(), WallClock()
    readers = _readers(job, clock)
    grammars = engine_grammars(job)
    others, files = other_ranks(job, ranks, at_end), noted_weights(job)
    runner, pool, left = _load(job, readers, others, data)
    rules, settings = scheduler_config(config, pool, spec), live_settings(config, pool)
    cache = cache_config(config.options, runner.pool)
    engine = {"scheduler": rules, "settings": settings, "cache": cache, "clock": clock}
    recording = _recorded(job, at_end, **engine)
    observer = readers if recording is None else Tee(readers, recording)
    sides, giver, taker = open_sides(job, runner, others, socket.post, at_end)
    tiers = open_tiers(job, runner, others, socket.post, files) if rules.tiers else None
    scheduler = Scheduler(
        rules,
        settings,
        _cache_of(job, cache),
        observer=observer,
        preparer=_preparer(job, grammars, socket),
        giver=giver,
        taker=taker,
        mover=None if tiers is None else tiers.movers,
    )
    write_stacks_when_asked()
    beat = Heartbeat(socket, lambda: scheduler.state.stands_still)
    executor = _executor(runner, others)
    loop = Loop(
        scheduler,
        executor,
        socket,
        depth=config.overlap_depth,
        clock=clock,
        observer=observer,
        operator=_watched(_operator(job, executor, beat, others), tiers, job, sides),
        heartbeat=beat,
        accompany=runner.accompany,
        report=lambda: readers.report(
            _memory_usage(runner),
            None if recording is None else recording.state(),
            _expert_loads(executor, job, data),
            _tier_state(tiers, scheduler),
        ),
        moments=lambda since: readers.told(since, _tier_state(tiers, scheduler)),
        cpu_clock=time.thread_time if config.options.execution.device == "cpu" else None,
    )
    gc.collect()
    gc.freeze()
    if data is not None:
        report("waiting for the other engines")
        data.begin(0)  # a step without tokens, which all begin when they are ready
    socket.send(Ready(_facts(runner, pool, left, waited)))
    once_idle(lambda: scheduler.state.is_idle, grammars.prepare)
    return loop


def _expert_loads(
    executor: InprocExecutor, job: EngineJob, data: SharedMemoryDataRanks | None
) -> ExpertLoads | None:
    """Engines that compute the experts together count the same tokens."""
    return executor.expert_loads() if data is None or not job.rank else None


def _tier_state(tiers: CacheTiers | None, scheduler: Scheduler) -> TierState | None:
    return None if tiers is None else tiers.state(scheduler.state.tiers)


def _preparer(
    job: EngineJob, grammars: GrammarFactory, socket: EngineSocket
) -> GrammarThreads | None:
    """What makes grammars; a model that embeds needs none."""
    if job.config.options.model.is_embedding:
        return None
    return GrammarThreads(grammars, socket.post)


def _recorded(job: EngineJob, at_end: ExitStack, **engine: Any) -> RecordingWriter | None:
    """What records the engine, if that is asked for. engine: as for ``start_recording``."""
    options = job.config.options
    if (wanted := recording_config(options)) is None:
        return None
    device = options.execution.device
    recording = start_recording(wanted, device=device, when_used=job.is_standby, **engine)
    at_end.callback(recording.close)
    return recording


def _executor(runner: ModelRunner, others: OtherRanks | None) -> InprocExecutor:
    return InprocExecutor(runner) if others is None else TensorParallelExecutor(runner, others)


def _load(
    job: EngineJob, observer: Observer, others: OtherRanks | None, data: DataRanks | None
) -> tuple[ModelRunner, PoolConfig, int]:
    """``load_engine``; a standby loads while another engine serves, and leaves it the cores."""
    load = partial(load_engine, job, observer, others, data)
    return at_low_priority(load) if job.is_standby else load()


def _readers(job: EngineJob, clock: WallClock) -> EngineReaders:
    config = job.config
    return EngineReaders(
        device=config.options.execution.device,
        decode_log_interval=config.options.logs.decode_log_interval,
        request_times=config.options.logs.enable_request_time_stats_logging,
        metrics=config.options.metrics.enable_metrics,
        epoch=time.time() - clock.now(),
        work=work_model(config, job.spec) if config.options.metrics.enable_mfu_metrics else None,
    )


def _cache_of(job: EngineJob, config: CacheConfig) -> KVCache:
    cache = config.empty_cache()
    if job.tells_prefixes:
        cache.listen(CacheNews())
    if publisher_config(job.config.options.events) is not None:
        cache.listen(BlockNews(config.page_size))
    return cache


def once_idle(is_idle: Callable[[], bool], work: Callable[[], None]) -> threading.Thread:
    """Have a thread do the work as soon as the engine has been idle at ``IDLE_LOOKS`` looks."""

    def wait() -> None:
        looks = 0
        while looks < IDLE_LOOKS:
            time.sleep(LOOK_EVERY_S)
            looks = looks + 1 if is_idle() else 0
        work()

    thread = threading.Thread(target=wait, name="once-idle", daemon=True)
    thread.start()
    return thread


def _operator(
    job: EngineJob,
    executor: InprocExecutor,
    beat: Callable[[], None],
    others: OtherRanks | None,
) -> EngineOperator:
    """What carries out operations, and balances experts if that is asked for."""
    device, experts = job.config.options.execution.device, job.config.options.experts
    make = EngineOperator if others is None else partial(TensorParallelOperator, others=others)
    operator = make(
        executor.runner,
        executor.profiler,
        engine_config(job.config, job.spec, job.folder),
        available_bytes=lambda: device_bytes(device),
        heartbeat=beat,
    )
    if experts.enable_eplb:
        executor.balancer = ExpertBalancer(
            executor.runner,
            operator.place_experts,
            every=experts.eplb_rebalance_num_iterations,
            at_most=experts.eplb_min_rebalancing_utilization_threshold,
        )
    return operator


def _watched(
    operator: EngineOperator, tiers: CacheTiers | None, job: EngineJob, sides: Sides
) -> Operator:
    """The operator, after whose work the tiers and the sides of handovers know the engine again."""
    known = operator if tiers is None else WatchedOperator(operator, tiers)
    return RenewingOperator(known, job, sides)


def _phases(runner: ModelRunner, *, waited_s: float, whole_s: float) -> dict[str, float]:
    """Phase of the start -> seconds; together they are the whole start."""
    known = {
        "engine wait": waited_s,
        "load_weight": runner.report.load_seconds,
        "kv_cache_allocation": runner.allocate_seconds,
    }
    return {**known, "memory plan and scheduler": whole_s - sum(known.values())}


def _facts(
    runner: ModelRunner, pool: PoolConfig, available_bytes: int, waited_from: float
) -> EngineFacts:
    """waited_from: when the engine began to build itself, as ``time.perf_counter`` says it."""
    report = runner.report
    whole_s = time.perf_counter() - IMPORTED_AT
    phases = _phases(runner, waited_s=waited_from - IMPORTED_AT, whole_s=whole_s)
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
        phases=phases,
    )


def _memory_usage(runner: ModelRunner) -> MemoryUsage:
    gib = 1 << 30
    return MemoryUsage(
        weight=(0 if runner.model is None else runner.report.weight_bytes) / gib,
        kvcache=runner.pool.num_bytes / gib,
        graph=sum(way.num_bytes for way in runner.ways) / gib,
    )


def end_with_parent() -> None:
    """End the process when the parent ends. Runs in a thread: the parent keeps the other end of
    standard input open as long as it lives."""
    os.read(sys.stdin.fileno(), 1)
    logger.error("The parent process is gone; the engine ends.")
    for compiler in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            compiler.kill()
    os._exit(1)
