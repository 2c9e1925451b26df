"""The engine process: ``python -m setpoint.launch`` with an EngineJob on its standard input.

Loads the model, sizes the memory, says Ready, and runs the scheduler's loop until Shutdown. It is
started before the parent knows the configuration, so that importing torch overlaps with finding the
model.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import psutil
import torch

from setpoint.config.hardware import available_bytes
from setpoint.config.options import Options
from setpoint.config.pool import PoolConfig, memory_model, resolve_pool
from setpoint.config.resolve import ResolvedConfig
from setpoint.core.errors import SetpointError
from setpoint.core.messages import Failed, Ready, Starting
from setpoint.core.model import ModelSpec
from setpoint.core.progress import report, reported_to
from setpoint.engine.executor.build import build_runner
from setpoint.engine.executor.compiling import compile_steps
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint.engine.kernels.device import check_device
from setpoint.engine.runner.model_runner import ModelRunner
from setpoint.ipc import EngineSocket
from setpoint.launch.announce import log_decisions
from setpoint.launch.job import EngineJob, decode_job
from setpoint.launch.mapping import empty_cache, engine_config, scheduler_config
from setpoint.observe.logline import LogLines, gib, ready_line, setup_logging
from setpoint.observe.tee import Tee
from setpoint.observe.turn_times import TurnTimes
from setpoint.planning.memory import CAPTURED_TOKENS
from setpoint.scheduler.loop import Loop
from setpoint.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

REARM_S = 1.0
"""Seconds between re-armings of the watchdog."""


class WallClock:
    def now(self) -> float:
        return time.monotonic()


def main() -> int:
    """Exit code 0 after Shutdown; the parent learns of a failed start from a Failed message before
    the exit.

    The parent blocks SIGINT and SIGTERM for this process: they may reach the whole group, and the
    parent ends it in order.
    """
    imported = time.perf_counter()
    line = sys.stdin.buffer.readline()
    if not line:
        return 1  # the parent gave up before it had a job; it has said why
    job = decode_job(line)
    setup_logging(job.config.options.log_level, rank=" TP0", milliseconds=job.config.env.log_ms)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    socket = EngineSocket(job.link)
    try:
        with reported_to(lambda doing: socket.send(Starting(doing))):
            loop = _build(job, socket, imported)
    except SetpointError as error:
        socket.send(Failed(str(error)))
        socket.close()
        return 1
    loop.run()
    socket.close()
    return 0


def _build(job: EngineJob, socket: EngineSocket, started: float) -> Loop:
    config, spec = job.config, job.spec
    waited = time.perf_counter()
    runner, pool = _load(config, spec, job.folder)
    times = TurnTimes()
    lines = LogLines(
        decode_log_interval=config.options.decode_log_interval,
        device=config.options.device,
        started_at=time.monotonic(),
    )
    observer = Tee(lines, times)
    scheduler = Scheduler(
        scheduler_config(config, pool, spec),
        empty_cache(config.options, pool),
        observer=observer,
    )
    loop = Loop(
        scheduler,
        InprocExecutor(runner),
        socket,
        depth=config.overlap_depth,
        clock=WallClock(),
        observer=observer,
        heartbeat=_watchdog(config.options.watchdog_timeout),
        state_info=lambda: _state_info(runner, lines) | {"turn_times": times.info()},
    )
    gc.collect()
    gc.freeze()
    now = time.perf_counter()
    info = _ready_info(runner, pool) | {
        "phases": {"engine wait": waited - started, "weights and pool": now - waited}
    }
    socket.send(Ready(info))
    return loop


def _load(config: ResolvedConfig, spec: ModelSpec, folder: str) -> tuple[ModelRunner, PoolConfig]:
    """Weights, then the pool from what is really left, with SGLang's start-up lines."""
    options = config.options
    check_device(torch.device(options.device))
    before = _available_bytes(options.device)
    logger.debug("Load weight begin. avail mem=%s GB", gib(before))
    report("loading the weights")
    runner = build_runner(engine_config(config, spec, folder))
    loaded, after = runner.report, _available_bytes(options.device)
    logger.info(
        "Load weight end. elapsed=%.2f s, type=%s, avail mem=%s GB, mem usage=%s GB.",
        loaded.load_seconds,
        spec.architecture,
        gib(after),
        gib(loaded.weight_bytes),
    )
    logger.debug(
        "Model: %s, kernels: %s, linear layers: %s, attention: %s, instruction set: %s",
        loaded.model_impl,
        loaded.ops,
        loaded.linear,
        loaded.attention,
        loaded.level or "torch's own",
    )
    logger.debug("Weights: %s", loaded.weights)
    for fallback in loaded.fallbacks:
        logger.warning("Fallback: %s", fallback)
    plan = memory_model(
        config, spec, attention=loaded.attention, model_impl=loaded.model_impl
    ).plan(before, available_after_load=min(after, before - loaded.weight_bytes))
    pool = resolve_pool(config, plan.pool_tokens, limited_by=plan.limited_by)
    log_decisions(pool.decisions)
    report("making room for the KV cache")
    runner.allocate(
        num_pages=plan.pool_tokens // options.page_size,
        max_slots=pool.max_running_requests,
        context_len=config.context_len,
    )
    if runner.why_eager:
        logger.info(
            "Steps run %s: %s", "partly eagerly" if runner.captured else "eagerly", runner.why_eager
        )
    if runner.captured is not None:
        logger.debug(
            "Steps of up to %d tokens are captured. mem usage=%s GB",
            CAPTURED_TOKENS,
            gib(runner.captured.program.num_bytes),
        )
    half = gib(plan.kv_bytes / 2)
    logger.info(
        "KV Cache is allocated. dtype: %s, #tokens: %d, K size: %s GB, V size: %s GB",
        options.kv_cache_dtype,
        plan.pool_tokens,
        half,
        half,
    )
    left = _available_bytes(options.device)
    logger.debug("Memory pool end. avail mem=%s GB", gib(left))
    if options.enable_torch_compile:
        compile_small_steps(runner, options)
    logger.info(
        ready_line(
            max_total_num_tokens=plan.pool_tokens,
            chunked_prefill_size=config.chunked_prefill_size,
            max_prefill_tokens=options.max_prefill_tokens,
            max_running_requests=pool.max_running_requests,
            context_len=config.context_len,
            device=options.device,
            available_bytes=left,
        )
    )
    return runner, pool


def compile_small_steps(runner: ModelRunner, options: Options) -> None:
    """``--enable-torch-compile``: what was compiled, what was reused, what it gains, or why it does
    not."""
    wanted = options.torch_compile_max_bs
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
    if compiled.why_not_more:
        which = (
            f"steps of more than {compiled.max_tokens} tokens run"
            if compiled.max_tokens
            else "every step runs"
        )
        logger.warning("torch.compile: %s without it: %s.", which, compiled.why_not_more)


def _ready_info(runner: ModelRunner, pool: PoolConfig) -> dict[str, Any]:
    return {
        "max_total_num_tokens": pool.max_total_num_tokens,
        "max_running_requests": pool.max_running_requests,
        "max_req_len": pool.max_req_len,
        "max_req_input_len": pool.max_req_input_len,
        "weight_bytes": runner.report.weight_bytes,
        "weights": runner.report.weights,
        "model_impl": runner.report.model_impl,
        "kernels": runner.report.ops,
        "linear_layers": runner.report.linear,
        "attention": runner.report.attention,
        "kernel_level": runner.report.level,
        "fallbacks": list(runner.report.fallbacks),
        "decisions": [asdict(decision) for decision in pool.decisions],
    }


def _state_info(runner: ModelRunner, lines: LogLines) -> dict[str, Any]:
    """The engine's part of ``/server_info``'s internal_states."""
    graph = 0 if runner.captured is None else runner.captured.program.num_bytes
    usage = {"weight": runner.report.weight_bytes, "kvcache": runner.pool.num_bytes, "graph": graph}
    return {
        "last_gen_throughput": lines.last_gen_throughput,
        "memory_usage": {name: num_bytes / (1 << 30) for name, num_bytes in usage.items()},
    }


def _available_bytes(device: str) -> int:
    if device == "cpu":
        return available_bytes()
    free, _ = torch.cuda.mem_get_info()
    return int(free)


def _end_with_parent() -> None:
    """Runs in a thread: the parent holds the other end of standard input open for as long as it
    lives."""
    os.read(sys.stdin.fileno(), 1)
    logger.error("The parent process is gone; the engine ends.")
    for compiler in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            compiler.kill()
    os._exit(1)


def _watchdog(timeout_s: float) -> Callable[[], None]:
    """Called every turn of the loop: re-arms the dump-and-exit of a turn that hangs for
    ``timeout_s``."""
    next_at = 0.0

    def beat() -> None:
        nonlocal next_at
        now = time.monotonic()
        if now >= next_at:
            next_at = now + REARM_S
            faulthandler.dump_traceback_later(timeout_s, exit=True)

    return beat
