"""A model on an executor in this process, without a scheduler or server, for measurements of single
steps.

Everything that decides the speed of a step (kernels, threads, data types) is resolved as for a
server.
"""

from __future__ import annotations

import gc
import os
from functools import partial

from setpoint.bench.emulation import refuse_emulation
from setpoint.bench.one_batch import Subject
from setpoint.checkpoint.source import DEFAULT_MODEL
from setpoint.config.commandline import CommandLine
from setpoint.config.environment import EnvSettings
from setpoint.core.cachegroups import cache_layout
from setpoint.core.errors import ConfigError
from setpoint.core.progress import reported_to
from setpoint.launch.parent.configuration import settle
from setpoint.launch.parent.preflight import preflight
from setpoint.launch.parent.process import engine_environment
from setpoint.launch.parent.start_log import log_configuration
from setpoint.observe.logline import log_fallback, setup_logging
from setpoint.observe.progress_display import Waiting, on_stderr


def bare_engine(line: CommandLine, env: EnvSettings, *, num_slots: int, length: int) -> Subject:
    """An executor with room for ``num_slots`` sequences of ``length`` tokens. Raises SetpointError,
    and ConfigError for sequences that are longer than the context."""
    options = line.options
    setup_logging(options.logs.log_level, milliseconds=env.log_ms)
    if options.model.is_embedding:
        raise ConfigError("With --is-embedding there are no decode steps to measure.")
    if options.execution.enable_torch_compile and line.own.breakdown:
        raise ConfigError(
            "--breakdown cannot time the parts of a compiled step; leave --enable-torch-compile"
            " out."
        )
    if options.parallel.tp_size > 1:
        raise ConfigError(
            "one-batch measures the steps of one process; leave --tp-size out. `setpoint bench"
            " serving` measures a server with several ranks."
        )
    preflight(options)
    waiting = Waiting(f"Loading {options.model.model_path or DEFAULT_MODEL}", on_stderr())
    try:
        with reported_to(waiting.doing):
            return _load(line, env, num_slots=num_slots, length=length)
    finally:
        waiting.end()


def _load(line: CommandLine, env: EnvSettings, *, num_slots: int, length: int) -> Subject:
    options = line.options
    served = settle(options, env, line.given)
    log_configuration(served, os.environ)
    config, spec = served.config, served.spec
    if length > config.context_len:
        raise ConfigError(
            f"--input-len and --output-len add up to {length}, more than the context of"
            f" {config.context_len} tokens."
        )
    os.environ.update(engine_environment())  # OpenMP reads it when torch is loaded
    from setpoint.engine.executor.build_runner import build_runner
    from setpoint.engine.executor.inproc import InprocExecutor
    from setpoint.engine.executor.measured import MeasuredExecutor
    from setpoint.engine.kernels.cpu.peak_rates import machine_limits
    from setpoint.launch.child.binding import bind
    from setpoint.launch.child.loading import compile_small_steps
    from setpoint.launch.child.mapping import engine_config

    if config.places:
        bind(config.places[0])
    runner = build_runner(engine_config(config, spec, str(served.source.folder)))
    report = runner.report
    refuse_emulation({"kernel_level": report.level, "kernels_emulated": report.emulated})
    pages = -(-length // config.page_size) * len(cache_layout(spec, length).groups)
    runner.allocate(num_pages=num_slots * pages, max_slots=num_slots, context_len=length)
    if config.options.execution.enable_torch_compile:
        not_compiled = compile_small_steps(runner, config.options)
        if not_compiled is not None:
            log_fallback(not_compiled)
    gc.collect()
    # as in the engine process: no garbage collection walks over the model during a step
    gc.freeze()
    return Subject(
        executor=InprocExecutor(runner),
        page_size=config.page_size,
        num_groups=runner.num_groups,
        vocab_size=spec.vocab_size,
        chunk_tokens=(
            config.chunked_prefill_size if config.chunked_prefill_size > 0 else num_slots * length
        ),
        about={
            "model": served.source.name,
            "dtype": config.options.model.dtype,
            "device": config.options.execution.device,
            "num_threads": config.num_threads,
            "kernels": report.ops,
            "weights": report.weights,
            "linear_layers": report.linear,
            "attention": report.attention,
            "kernel_level": report.level,
        },
        measure=partial(MeasuredExecutor, runner),
        limits=machine_limits(config.options.execution.device, threads=config.num_threads),
    )
