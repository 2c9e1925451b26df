"""``setpoint serve --node-rank N`` with N above 0: a node that runs ranks only. They join node 0,
do what rank 0 asks for, and end with it; this process ends with them."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Set
from contextlib import suppress

from setpoint.config.devices import gpus_of_engines
from setpoint.config.environment import EnvSettings
from setpoint.config.nodes import ranks_of_nodes
from setpoint.config.options import Options
from setpoint.launch.deadline import SIGNALS
from setpoint.launch.job import encode_job
from setpoint.launch.parent.configuration import settle
from setpoint.launch.parent.preflight import preflight
from setpoint.launch.parent.start_log import log_configuration
from setpoint.launch.ranks import RankProcess, start_ranks
from setpoint.observe.logline import setup_logging

logger = logging.getLogger(__name__)


def run_node(options: Options, env: EnvSettings, *, given: Set[str]) -> int:
    """Run this node's ranks until the group ends; returns the exit code. Raises SetpointError for a
    model or configuration that cannot be served."""
    parallel = options.parallel
    setup_logging(options.logs.log_level, milliseconds=env.log_ms)
    preflight(options)
    ranks = ranks_of_nodes(parallel.tp_size, parallel.nnodes)[parallel.node_rank]
    # A signal may reach the whole process group, but this process ends its ranks.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    (gpus,) = gpus_of_engines(parallel)
    started = start_ranks(ranks, gpus)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        served = settle(options, env, given)
        log_configuration(served, os.environ)
        job = encode_job(served.job())
        for process in started.processes:
            process.link.send_bytes(job)
        return _first_to_end(started.processes)
    finally:
        for process in started.processes:
            process.popen.kill()
            process.popen.wait()


def _first_to_end(processes: list[RankProcess]) -> int:
    """Wait until a rank has ended; returns the exit code of this process."""
    pids = {process.popen.pid: process for process in processes}
    while True:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        process = pids.get(ended.si_pid)
        if process is None:  # a child of something else, such as a compiler
            with suppress(ChildProcessError):
                os.waitpid(ended.si_pid, 0)
            continue
        code = process.popen.wait()
        if code < 0:
            logger.error("A rank was ended by %s.", signal.Signals(-code).name)
            return 1
        if code == 0:
            logger.info("Node 0 has ended, and so does this node.")
        return code
