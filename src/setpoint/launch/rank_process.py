"""The process of a rank but the first: loads its part of the model, then does what rank 0 asks
for."""

from __future__ import annotations

import faulthandler
import gc
import mmap
import threading
from functools import partial
from multiprocessing.connection import Connection

from setpoint.core.errors import SetpointError
from setpoint.engine.executor.build_runner import build_runner
from setpoint.engine.executor.engine_operations import EngineOperator
from setpoint.engine.executor.profiling import Profiler
from setpoint.engine.executor.tensor_parallel import Loaded, Refused, encode, follow
from setpoint.engine.kernels.cpu.rank_memory import SharedMemoryGroup
from setpoint.launch.binding import bound
from setpoint.launch.engine_process import end_with_parent
from setpoint.launch.heartbeat import write_stacks_when_asked
from setpoint.launch.job import EngineJob, decode_job
from setpoint.launch.loading import device_bytes, log_weights
from setpoint.launch.low_priority import at_low_priority
from setpoint.launch.mapping import engine_config
from setpoint.launch.ranks import MEMORY_BYTES
from setpoint.observe.logline import setup_logging


def main(link: int, memory: int, rank: int, size: int) -> int:
    """Run the rank; returns the exit code."""
    faulthandler.enable()
    write_stacks_when_asked()
    threading.Thread(target=end_with_parent, daemon=True).start()
    connection = Connection(link)
    try:
        job = decode_job(connection.recv_bytes())
    except EOFError:
        return 1  # the engine ended before it had a job
    return run(job, connection, mmap.mmap(memory, MEMORY_BYTES), rank, size)


def run(job: EngineJob, link: Connection, memory: mmap.mmap, rank: int, size: int) -> int:
    options = job.config.options
    names = f" TP{rank}" if job.rank is None else f" DP{job.rank} TP{rank}"
    setup_logging(options.logs.log_level, rank=names, milliseconds=job.config.env.log_ms)
    job = bound(job, rank)
    config = engine_config(job.config, job.spec, job.folder)
    build = partial(build_runner, config, SharedMemoryGroup(memory, rank, size))
    try:
        runner = at_low_priority(build) if job.is_standby else build()
    except SetpointError as error:
        link.send_bytes(encode(Refused(str(error))))
        return 1
    log_weights(runner, job.spec, device_bytes(options.execution.device))
    link.send_bytes(encode(Loaded(runner.report.weight_bytes)))
    operator = EngineOperator(
        runner,
        Profiler(runner.device),
        config,
        available_bytes=lambda: device_bytes(options.execution.device),
        heartbeat=lambda: None,
    )
    gc.collect()
    gc.freeze()
    follow(runner, link, operator)
    return 0
