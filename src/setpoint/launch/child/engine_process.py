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
from dataclasses import dataclass, replace
from functools import partial

import msgspec
import psutil

from setpoint.config.groups.experts import ExpertOptions
from setpoint.core.control import EngineFacts
from setpoint.core.errors import CheckpointError, ConfigError, SetpointError
from setpoint.core.executor import Clock
from setpoint.core.messages import Failed, Prepared, Ready, Starting
from setpoint.core.operations import Operator
from setpoint.core.progress import report, reported_to
from setpoint.core.records import Observer
from setpoint.core.settings import Settings
from setpoint.engine.executor.build_runner import EngineConfig
from setpoint.engine.executor.engine_operations import EngineOperator
from setpoint.engine.executor.expert_balancing import ExpertBalancer
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint.engine.executor.tensor_parallel import (
    OtherRanks,
    TensorParallelExecutor,
    TensorParallelOperator,
)
from setpoint.engine.parallel.data_ranks import DataRanks
from setpoint.engine.parallel.group import GroupLost
from setpoint.engine.parallel.shared_tokens import SharedMemoryDataRanks
from setpoint.engine.runner.model_runner import ModelRunner
from setpoint.grammar.grammar_threads import GrammarThreads
from setpoint.handover.renewing_operator import RenewingOperator
from setpoint.ipc.sockets import EngineSocket
from setpoint.launch.child.binding import bound
from setpoint.launch.child.cache_tiers import open_tiers
from setpoint.launch.child.disaggregation import open_handovers
from setpoint.launch.child.engine_report import EngineReporter
from setpoint.launch.child.grammars import engine_grammars
from setpoint.launch.child.loading import LoadedModel, device_bytes, load_engine
from setpoint.launch.child.low_priority import at_low_priority
from setpoint.launch.child.mapping import (
    cache_config,
    computation_of,
    handover_setup,
    recording_config,
    tier_setup,
    work_model,
)
from setpoint.launch.child.rank_group import peers_of
from setpoint.launch.deadline import RANK_LOST, leave
from setpoint.launch.heartbeat import Heartbeat, write_stacks_when_asked
from setpoint.launch.job import EngineJob, decode_job
from setpoint.launch.lockstep_memory import bell_of
from setpoint.launch.ranks import RankProcesses
from setpoint.launch.settings import live_settings, scheduler_config
from setpoint.observe.logline import setup_logging
from setpoint.observe.readers import EngineReaders
from setpoint.observe.tee import Tee
from setpoint.recording.writer import RecordingWriter, start_recording
from setpoint.scheduler.cache.block_news import BlockNews
from setpoint.scheduler.cache.manager import KVCache
from setpoint.scheduler.cache.news import CacheNews
from setpoint.scheduler.loop import Loop
from setpoint.scheduler.scheduler import Scheduler
from setpoint.scheduler.scheduler_config import SchedulerConfig
from setpoint.tiers.identity import TierOperator

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
    if ranks is not None:
        ranks.hand_over(line)
    return run(decode_job(line), int(sys.argv[1]), ranks, inherited)


def run(
    job: EngineJob, link: int, ranks: RankProcesses | None, inherited: Sequence[int] = ()
) -> int:
    """Make this process the engine of a job; returns exit code 0 after Shutdown. link: the
    descriptor of its end of the link. ranks: the other ranks, which have their job. inherited: what
    it shares with the engines that compute in step with it (``lockstep_memory``). A start that
    fails sends the parent a Failed message first."""
    faulthandler.enable()  # native code that crashes: the log has the stack of every thread
    write_stacks_when_asked()
    own = job.rank or 0
    name = f" TP{own if inherited else 0}"
    name = name if job.rank is None else f" DP{own}{name}"
    if job.weights_folder:  # of one of several models
        name += f" {job.config.options.model.served_model_name}"
    setup_logging(job.config.options.logs.log_level, rank=name, milliseconds=job.config.env.log_ms)
    socket = EngineSocket(link, bell_of(inherited, own) if inherited else None)
    with ExitStack() as at_end:
        at_end.callback(socket.close)
        if ranks is not None:
            at_end.callback(ranks.end)
        job = bound(job, 0)
        try:
            try:
                with reported_to(lambda doing: socket.send(Starting(doing))):
                    loop, data = _build(job, socket, at_end, ranks, inherited)
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


def _build(
    job: EngineJob,
    socket: EngineSocket,
    at_end: ExitStack,
    ranks: RankProcesses | None,
    inherited: Sequence[int],
) -> tuple[Loop, SharedMemoryDataRanks | None]:
    """The engine of a job, from its options to its loop, and the engines that compute in step with
    it. Each part gets what it needs of the job and looks nothing up again."""
    waited_s, clock = time.perf_counter() - IMPORTED_AT, WallClock()
    options = job.config.options
    computation = computation_of(job)
    tier, handover = tier_setup(job), handover_setup(job)
    readers = _readers(job, clock)
    preparer = _preparer(job, socket.post)
    peers = peers_of(computation, ranks, inherited, job.rank or 0, at_end)
    others, data = peers.others, peers.data
    files = computation.noted_weights()
    loaded = _load(job, computation.engine, readers, others, data)
    runner = loaded.runner
    planning = _planning(job, loaded, readers, clock, at_end)
    handovers = open_handovers(handover, computation, runner, others, socket.post, at_end)
    tiers = open_tiers(tier, computation, runner, others, socket.post, files)
    scheduler = Scheduler(
        planning.rules,
        planning.settings,
        planning.cache,
        observer=planning.observer,
        preparer=preparer,
        giver=handovers.giver,
        taker=handovers.taker,
        mover=None if tiers is None else tiers.movers,
    )
    beat = Heartbeat(socket, lambda: scheduler.state.stands_still)
    executor, own = _executor(computation.engine, options.experts, runner, beat, others)
    operator: Operator = own if tiers is None else TierOperator(own, tiers)
    if handovers.sides is not None:
        operator = RenewingOperator(operator, handovers.sides.renew)
    counts_experts = data is None or not job.rank
    reporter = EngineReporter(
        readers, executor, scheduler, tiers, planning.recording, counts_experts
    )
    loop = Loop(
        scheduler,
        executor,
        socket,
        depth=job.config.overlap_depth,
        clock=clock,
        observer=planning.observer,
        operator=operator,
        heartbeat=beat,
        accompany=runner.accompany,
        report=reporter.report,
        moments=reporter.moments,
        cpu_clock=time.thread_time if options.execution.device == "cpu" else None,
    )
    _say_ready(loaded.facts, socket, data, waited_s=waited_s)
    if preparer is not None:
        once_idle(lambda: scheduler.state.is_idle, preparer.prepare)
    return loop, data


def _readers(job: EngineJob, clock: WallClock) -> EngineReaders:
    options = job.config.options
    work = work_model(job.config, job.spec) if options.metrics.enable_mfu_metrics else None
    return EngineReaders(
        device=options.execution.device,
        decode_log_interval=options.logs.decode_log_interval,
        request_times=options.logs.enable_request_time_stats_logging,
        metrics=options.metrics.enable_metrics,
        epoch=time.time() - clock.now(),
        work=work,
    )


def _preparer(job: EngineJob, post: Callable[[Prepared], None]) -> GrammarThreads | None:
    """What makes grammars; a model that embeds needs none."""
    options = job.config.options
    if options.model.is_embedding:
        return None
    factory = engine_grammars(options.execution, job.spec, job.tokenizer_folder)
    return GrammarThreads(factory, post)


def _load(
    job: EngineJob,
    engine: EngineConfig,
    observer: Observer,
    others: OtherRanks | None,
    data: DataRanks | None,
) -> LoadedModel:
    """``load_engine``; a standby loads while another engine serves, and leaves it the cores."""
    load = partial(
        load_engine,
        replace(engine, weights_folder=job.weights_folder),
        job.config,
        observer,
        memory_bytes=job.memory_bytes,
        is_standby=job.is_standby,
        others=others,
        data=data,
    )
    return at_low_priority(load) if job.is_standby else load()


@dataclass(slots=True, frozen=True)
class Planning:
    """What the scheduler works by, and who hears of its work."""

    rules: SchedulerConfig
    settings: Settings
    cache: KVCache
    observer: Observer
    recording: RecordingWriter | None


def _planning(
    job: EngineJob, loaded: LoadedModel, readers: EngineReaders, clock: Clock, at_end: ExitStack
) -> Planning:
    config, options = job.config, job.config.options
    rules = scheduler_config(config, loaded.pool, job.spec)
    settings = live_settings(config, loaded.pool)
    pages = cache_config(config, loaded.runner.pool)
    wanted, recording = recording_config(options), None
    if wanted is not None:
        recording = start_recording(
            wanted,
            device=options.execution.device,
            when_used=job.is_standby,
            scheduler=rules,
            settings=settings,
            cache=pages,
            clock=clock,
        )
        at_end.callback(recording.close)
    cache = pages.empty_cache()
    if job.tells_prefixes:
        cache.listen(CacheNews())
    if config.events is not None:
        cache.listen(BlockNews(pages.page_size))
    observer = readers if recording is None else Tee(readers, recording)
    return Planning(rules, settings, cache, observer, recording)


def _executor(
    config: EngineConfig,
    experts: ExpertOptions,
    runner: ModelRunner,
    beat: Callable[[], None],
    others: OtherRanks | None,
) -> tuple[InprocExecutor, EngineOperator]:
    """What runs steps, and what carries out operations and, if that is asked for, balances
    experts."""
    executor = InprocExecutor(runner) if others is None else TensorParallelExecutor(runner, others)
    make = EngineOperator if others is None else partial(TensorParallelOperator, others=others)
    operator = make(
        runner,
        executor.profiler,
        config,
        available_bytes=partial(device_bytes, config.device),
        heartbeat=beat,
    )
    if experts.enable_eplb:
        executor.balancer = ExpertBalancer(
            runner,
            operator.place_experts,
            every=experts.eplb_rebalance_num_iterations,
            at_most=experts.eplb_min_rebalancing_utilization_threshold,
        )
    return executor, operator


def _say_ready(
    facts: EngineFacts, socket: EngineSocket, data: DataRanks | None, *, waited_s: float
) -> None:
    """Say that the loop begins, and how long each phase of the start took; together they are the
    whole start. waited_s: how long the process had nothing to do."""
    gc.collect()
    gc.freeze()
    if data is not None:
        report("waiting for the other engines")
        data.begin(0)  # a step without tokens, which all begin when they are ready
    phases = {"engine wait": waited_s, **facts.phases}
    rest_s = time.perf_counter() - IMPORTED_AT - sum(phases.values())
    phases["memory plan and scheduler"] = rest_s
    socket.send(Ready(msgspec.structs.replace(facts, phases=phases)))


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


def end_with_parent() -> None:
    """End the process when the parent ends. Runs in a thread: the parent keeps the other end of
    standard input open as long as it lives."""
    os.read(sys.stdin.fileno(), 1)
    logger.error("The parent process is gone; the engine ends.")
    for compiler in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            compiler.kill()
    os._exit(1)
