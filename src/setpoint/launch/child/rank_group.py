"""Connects the ranks of one model: through shared memory if all are on the CPUs of this machine,
else through torch.distributed, with node 0's store as the place where they find each other."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection

import msgspec
import torch
import torch.distributed as dist

from setpoint.config.groups.parallel import ParallelOptions
from setpoint.config.nodes import ranks_of_nodes, rendezvous_address
from setpoint.core.progress import report
from setpoint.engine.executor.tensor_parallel import OtherRanks
from setpoint.engine.kernels.cpu.rank_memory import SharedMemoryGroup
from setpoint.engine.parallel.distributed_group import (
    DistributedGroup,
    gloo_processes,
    nccl_processes,
)
from setpoint.engine.parallel.group import Group
from setpoint.engine.parallel.shared_tokens import SharedMemoryDataRanks
from setpoint.launch.child.computation_identity import ComputationIdentity
from setpoint.launch.child.rendezvous import Rendezvous, RendezvousFailed, join, own_host, peer
from setpoint.launch.lockstep_memory import mapped, ring
from setpoint.launch.ranks import RankProcesses

LOOPBACK = "127.0.0.1"


class StoreAddress(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Rank 0 tells another rank where its store is."""

    port: int
    host: str
    """The host of node 0. Ranks of other nodes use the one at the other end of their link."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(StoreAddress).decode


def shares_memory(computation: ComputationIdentity) -> bool:
    """Whether the ranks exchange through shared memory."""
    return computation.parallel.nnodes == 1 and computation.engine.device == "cpu"


@dataclass(slots=True, frozen=True)
class Peers:
    """The processes with which rank 0 of an engine computes."""

    others: OtherRanks | None
    """The other ranks of its model; None if there are none."""
    data: SharedMemoryDataRanks | None
    """The engines that compute in step with it; None if there are none."""


def peers_of(
    computation: ComputationIdentity,
    ranks: RankProcesses | None,
    inherited: Sequence[int],
    rank: int,
    at_end: ExitStack,
) -> Peers:
    """Rank 0's side, once all have joined. ranks: those on this node. inherited: see
    ``lockstep_memory``. rank: the engine's among these. Raises RendezvousFailed."""
    others = other_ranks(computation, ranks, at_end)
    if not inherited:
        return Peers(others, None)
    size, wake = computation.parallel.dp_size, partial(ring, inherited, rank)
    return Peers(others, SharedMemoryDataRanks(mapped(inherited), rank, size, wake))


def other_ranks(
    computation: ComputationIdentity, ranks: RankProcesses | None, at_end: ExitStack
) -> OtherRanks | None:
    parallel = computation.parallel
    if parallel.ranks_per_engine == 1:
        return None
    if not shares_memory(computation):
        return _connected(computation, [] if ranks is None else ranks.links, at_end)
    assert ranks is not None
    group = SharedMemoryGroup(ranks.memory, 0, parallel.tp_size)
    return OtherRanks(group, ranks.links, num_sharing=parallel.tp_size)


def _connected(
    computation: ComputationIdentity, links: list[Connection], at_end: ExitStack
) -> OtherRanks:
    """The ranks that exchange through torch.distributed. links: to those on this node."""
    parallel, device = computation.parallel, computation.engine.device
    host, rendezvous = LOOPBACK, None
    if parallel.nnodes > 1:
        rendezvous = _rendezvous(computation)
        at_end.callback(rendezvous.close)
        report(f"waiting for {rendezvous.missing}")
        remote = rendezvous.wait(parallel.dist_timeout)
        host = own_host(remote[0])
        links = [*links, *remote]
        rendezvous.watch_links()
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_limit(parallel))
    for link in links:
        link.send_bytes(_encode(StoreAddress(store.port, host)))
    group = _connect(computation, store, 0, host)
    num_sharing = parallel.ranks_per_node if device == "cpu" else 1
    return OtherRanks(group, links, num_sharing=num_sharing)


def _rendezvous(computation: ComputationIdentity) -> Rendezvous:
    parallel, facts = computation.parallel, computation.facts()
    nodes = ranks_of_nodes(parallel.tp_size, parallel.nnodes)
    place = rendezvous_address(parallel)
    return Rendezvous(
        place,
        {rank: node for node, of_node in enumerate(nodes) if node for rank in of_node},
        facts=facts,
        seed=computation.engine.seed,
        secret=parallel.dist_secret,
    )


def join_node_0(computation: ComputationIdentity, rank: int) -> tuple[Connection, int]:
    """The link of a rank on another node to rank 0, and the seed of the weights. Raises
    RendezvousFailed."""
    parallel = computation.parallel
    return join(
        rendezvous_address(parallel),
        rank=rank,
        node=parallel.node_rank,
        facts=computation.facts(),
        secret=parallel.dist_secret,
        timeout_s=parallel.dist_timeout,
    )


def own_group(
    computation: ComputationIdentity, link: Connection, memory: mmap.mmap, rank: int
) -> Group:
    """Another rank's side. link: to rank 0. memory: what the ranks of this node share. Raises
    RendezvousFailed."""
    parallel = computation.parallel
    if shares_memory(computation):
        return SharedMemoryGroup(memory, rank, parallel.tp_size)
    try:
        found = _decode(link.recv_bytes())
    except (EOFError, OSError):
        raise RendezvousFailed("Node 0 has ended before all ranks had joined.") from None
    is_here = parallel.node_rank == 0
    host, own = (found.host, found.host) if is_here else (peer(link), own_host(link))
    store = _or_not_met(
        lambda: dist.TCPStore(host, found.port, is_master=False, timeout=_limit(parallel))
    )
    return _connect(computation, store, rank, own)


def _connect(computation: ComputationIdentity, store: dist.Store, rank: int, host: str) -> Group:
    """host: of this process, as the other ranks reach it."""
    device, parallel = torch.device(computation.engine.device), computation.parallel
    size, timeout_s = parallel.tp_size, float(parallel.dist_timeout)

    def connect() -> dist.ProcessGroup:
        if device.type == "cpu":
            return gloo_processes(store, rank, size, host=host, timeout_s=timeout_s)
        own = torch.device(device.type, torch.cuda.current_device())
        return nccl_processes(store, rank, size, device=own, timeout_s=timeout_s)

    has_nccl = device.type != "cpu"
    # In which order NCCL adds depends on the size of what it adds.
    sums = has_nccl and not computation.engine.invariant
    return DistributedGroup(_or_not_met(connect), sums=sums, is_capturable=has_nccl)


def _or_not_met(connect: Callable[[], object]) -> object:
    try:
        return connect()
    except RuntimeError as error:  # torch's own exceptions are of this type
        raise RendezvousFailed(
            f"The ranks cannot reach each other: {str(error).partition(chr(10))[0]}"
        ) from None


def _limit(parallel: ParallelOptions) -> timedelta:
    return timedelta(seconds=parallel.dist_timeout)
