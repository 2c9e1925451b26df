"""The process of a rank but the first: loads its part of the model, then does what rank 0 asks
for."""

from __future__ import annotations

import faulthandler
import gc
import logging
import mmap
import os
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection

from setpoint.core.errors import SetpointError
from setpoint.engine.executor.build_runner import build_runner
from setpoint.engine.executor.engine_operations import EngineOperator
from setpoint.engine.executor.profiling import Profiler
from setpoint.engine.executor.tensor_parallel import Loaded, RankRefused, encode, follow
from setpoint.engine.parallel.group import Group, GroupLost
from setpoint.launch.child.binding import bound
from setpoint.launch.child.cache_tiers import LateTiers
from setpoint.launch.child.computation_identity import ComputationIdentity
from setpoint.launch.child.disaggregation import LateSides
from setpoint.launch.child.engine_process import end_with_parent
from setpoint.launch.child.loading import device_bytes, log_weights
from setpoint.launch.child.low_priority import at_low_priority
from setpoint.launch.child.mapping import computation_of, handover_setup, tier_setup
from setpoint.launch.child.rank_group import join_node_0, own_group
from setpoint.launch.child.rendezvous import RendezvousFailed, watch
from setpoint.launch.heartbeat import write_stacks_when_asked
from setpoint.launch.job import EngineJob, decode_job
from setpoint.launch.ranks import MEMORY_BYTES
from setpoint.observe.logline import setup_logging

STEP_S = 2.0
"""How long a rank may take to end after node 0 has closed the link."""

logger = logging.getLogger(__name__)


def main(link: int, memory: int, rank: int) -> int:
    """Run the rank; returns the exit code."""
    faulthandler.enable()
    write_stacks_when_asked()
    threading.Thread(target=end_with_parent, daemon=True).start()
    connection = Connection(link)
    try:
        job = decode_job(connection.recv_bytes())
    except EOFError:
        return 1  # the engine ended before it had a job
    return run(job, connection, mmap.mmap(memory, MEMORY_BYTES), rank)


def run(job: EngineJob, link: Connection, memory: mmap.mmap, rank: int) -> int:
    """link: to the process that started this one, which is rank 0 on its node."""
    options = job.config.options
    names = f" TP{rank}" if job.rank is None else f" DP{job.rank} TP{rank}"
    setup_logging(options.logs.log_level, rank=names, milliseconds=job.config.env.log_ms)
    job = bound(job, rank)
    computation = computation_of(job)
    is_remote = options.parallel.node_rank > 0
    try:
        if is_remote:
            link, seed = join_node_0(computation, rank)
            computation = replace(computation, engine=replace(computation.engine, seed=seed))
            watch(link, _end_late)
            logger.info("Rank %d has joined node 0 and waits for the other ranks.", rank)
        group = own_group(computation, link, memory, rank)
        return _take_part(job, computation, group, link)
    except RendezvousFailed as error:
        logger.error("%s", error)
    except GroupLost as error:
        time.sleep(STEP_S)  # rank 0 may say more about it, and end this process
        logger.error("An exchange with the other ranks failed: %s", error)
    except OSError as error:
        if not is_remote and isinstance(error, ConnectionResetError):
            return 0  # rank 0 was killed; ``end_with_parent`` says so
        if not is_remote:
            raise
        logger.error("The link to node 0 is lost: %s.", error.strerror or error)
    return 1


def _end_late(why: str) -> None:
    """End a process that is still in a step although node 0 has gone."""
    time.sleep(STEP_S)
    logger.error("The link to node 0 is lost: %s.", why)
    os._exit(1)


def _take_part(
    job: EngineJob, computation: ComputationIdentity, group: Group, link: Connection
) -> int:
    config, files = computation.engine, computation.noted_weights()
    available = device_bytes(config.device)
    try:
        build = partial(build_runner, config, group)
        runner = at_low_priority(build) if job.is_standby else build()
    except SetpointError as error:
        link.send_bytes(encode(RankRefused(str(error))))
        return 1
    log_weights(runner, config.spec, device_bytes(config.device))
    report = runner.report
    link.send_bytes(encode(Loaded(report.weight_bytes, available, report.level)))
    operator = EngineOperator(
        runner,
        Profiler(runner.device),
        config,
        available_bytes=lambda: device_bytes(config.device),
        heartbeat=lambda: None,
    )
    gc.collect()
    gc.freeze()
    tiers = sides = None
    with ExitStack() as at_end:
        if (tier := tier_setup(job)) is not None:
            operator = tiers = LateTiers(tier, computation, runner, operator, group.rank, files)
        if (side := handover_setup(job)) is not None:
            operator = sides = LateSides(side, computation, runner, operator, at_end, group.rank)
        # These two move this rank's share of pages.
        follow(
            runner,
            link,
            operator,
            None if tiers is None else tiers.make,
            None if sides is None else sides.make,
        )
    return 0
