"""Binds a rank to its cores and its memory to their NUMA node, as ``config.placement`` has planned.

Threads inherit both from the thread that starts them, so this comes before torch has threads.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace as with_fields

import msgspec

from setpoint.config.placement import RankPlacement
from setpoint.launch.job import EngineJob

SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Numbers of the system call, for which the C library has no function."""
MPOL_PREFERRED = 1

OWN_BINDING = ("GOMP_CPU_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
"""Variables with which GNU OpenMP binds each thread by itself, to the CPUs that the process had at
its start."""

logger = logging.getLogger(__name__)


def bound(job: EngineJob, rank: int) -> EngineJob:
    """Bind this process, a rank of the job's engine, if the job says where to. Returns the job with
    the rank's number of threads."""
    config, parallel = job.config, job.config.options.parallel
    if not config.places:
        return job
    ranks = parallel.ranks_per_node
    first, lowest = (job.rank or 0) * ranks, parallel.node_rank * ranks
    of_engine = config.places[first : first + ranks]
    if rank == lowest:
        where = "; ".join(f"TP{i} on {place}" for i, place in enumerate(of_engine, lowest))
        why = next(each.why for each in config.decisions if each.field == "placement")
        logger.info("Bound to cores: %s (%s).", where, why)
        for name in OWN_BINDING:
            if os.environ.get(name, "false").lower() != "false":
                logger.warning(
                    "%s is set, so OpenMP moves threads to other CPUs again, the same ones for all"
                    " ranks. Unset it.",
                    name,
                )
    place = of_engine[rank - lowest]
    bind(place)
    options = config.options.replace(num_threads=place.num_threads)
    return msgspec.structs.replace(job, config=with_fields(config, options=options))


def bind(place: RankPlacement) -> None:
    """Bind all threads of this process. What cannot be bound is logged: a rank computes the same
    anywhere, only slower."""
    try:
        _bind_threads(place.cpus)
    except OSError as error:
        logger.warning("Not bound to %s: %s.", place, error.strerror)
        return
    try:
        if place.node is not None:
            prefer_memory_of(place.node)
    except OSError as error:
        logger.info(
            "Memory is not bound to NUMA node %d: %s (set_mempolicy). A page is near the thread"
            " that first writes it, if there is room.",
            place.node,
            error.strerror,
        )


def _bind_threads(cpus: Collection[int]) -> None:
    for thread in os.listdir("/proc/self/task"):  # libraries start some when they are imported
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cpus)


def prefer_memory_of(node: int) -> None:
    """Have this thread, and those that it will start, take memory from this node as long as there
    is any. Raises OSError; containers often forbid it."""
    number = SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << node % bits
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel looks at one bit less than it is told.
    if libc.syscall(number, MPOL_PREFERRED, mask, len(mask) * bits + 1):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
