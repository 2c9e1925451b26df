"""Groups of ranks that gloo connects, for ranks that are threads of one process
(``setpoint_testing.ranks``)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from setpoint.engine.parallel.distributed_group import DistributedGroup, gloo_processes

TIMEOUT_S = 60.0


def gloo_groups(size: int, *, sums: bool = False) -> list[DistributedGroup]:
    """The group of each rank."""
    store = dist.HashStore()

    def connect(rank: int) -> DistributedGroup:
        processes = gloo_processes(store, rank, size, host="127.0.0.1", timeout_s=TIMEOUT_S)
        return DistributedGroup(processes, sums=sums)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(connect, range(size)))
