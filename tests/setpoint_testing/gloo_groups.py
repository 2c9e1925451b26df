"""Groups of ranks that gloo connects, for ranks that are threads of one process
(``setpoint_testing.ranks``)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from setpoint.engine.parallel.distributed_group import DistributedGroup, gloo_processes
from setpoint_testing.fake_graphs import recording

TIMEOUT_S = 60.0


def gloo_groups(
    size: int, *, sums: bool = False, is_capturable: bool = False
) -> list[DistributedGroup]:
    """The group of each rank. is_capturable: its exchanges become a part of what is captured
    (``setpoint_testing.fake_graphs``), as those of NCCL do."""
    store = dist.HashStore()

    def connect(rank: int) -> DistributedGroup:
        processes = gloo_processes(store, rank, size, host="127.0.0.1", timeout_s=TIMEOUT_S)
        group = DistributedGroup(processes, sums=sums, is_capturable=is_capturable)
        if is_capturable:
            group._exchange = recording(group._exchange)
        return group

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(connect, range(size)))
