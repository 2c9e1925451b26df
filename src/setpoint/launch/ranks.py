"""Starts the ranks of a node (--tp-size, --nnodes): on node 0 children of the engine's process, the
first rank; on the others of the node's own process (``launch.parent.node``).

They share one piece of memory without a name, so nothing of it is left whatever ends them. An
engine and its ranks end together: a rank ends when rank 0 does, and rank 0 ends when a rank does,
so that whoever supervises the engine judges its end as that of one process: by the same signal
after a crash, with RANK_LOST if the rank was killed.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

from setpoint.launch.deadline import RANK_LOST
from setpoint.launch.own_gpus import with_gpus

DIE_S = 5.0
"""How long a signal may take to end this process."""
MEMORY_BYTES = 8 << 20
"""Size of the memory that the ranks share. Exchanges that need more than half of it are made in
several parts."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class RankProcess:
    popen: subprocess.Popen[bytes]
    link: Connection


@dataclass(slots=True)
class RankProcesses:
    """The ranks of a node but the first of all, as the process sees them that started them."""

    processes: list[RankProcess]
    memory: mmap.mmap
    is_ending: bool = False
    """Whether the engine ends in order."""

    @property
    def links(self) -> list[Connection]:
        return [each.link for each in self.processes]

    def hand_over(self, job: bytes) -> None:
        """Send the ranks their job. From now on, this process ends as soon as one of them has
        ended."""
        for rank, process in enumerate(self.processes, 1):
            threading.Thread(target=self._wait, args=(rank, process.popen), daemon=True).start()
        for process in self.processes:
            with suppress(OSError):  # it has ended, and so will this process
                process.link.send_bytes(job)

    def end(self) -> None:
        """Close the links, which ends the ranks, and wait for them."""
        self.is_ending = True
        for process in self.processes:
            process.link.close()
        for process in self.processes:
            process.popen.wait()

    def _wait(self, rank: int, popen: subprocess.Popen[bytes]) -> None:
        code = popen.wait()
        if self.is_ending:
            return
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        logger.error("Rank %d (process %d) has ended: %s. The engine ends.", rank, popen.pid, how)
        logging.shutdown()
        if code == -signal.SIGKILL:
            os._exit(RANK_LOST)
        if code < 0:
            os.kill(os.getpid(), -code)
            time.sleep(DIE_S)
        os._exit(1)


def start_ranks(ranks: range, gpus: Sequence[int]) -> RankProcesses:
    """Start these ranks, which import torch meanwhile and wait for their job. gpus: the numbers of
    the visible GPUs that they would use; on node 0, rank 0 has the first one."""
    descriptor = os.memfd_create("setpoint-ranks")
    os.ftruncate(descriptor, MEMORY_BYTES)
    try:
        processes = [
            _start(rank, descriptor, gpu=gpu) for rank, gpu in zip(ranks, gpus, strict=True)
        ]
        return RankProcesses(processes, mmap.mmap(descriptor, MEMORY_BYTES))
    finally:
        os.close(descriptor)


def _start(rank: int, memory: int, *, gpu: int) -> RankProcess:
    ours, theirs = socket.socketpair()
    with theirs:
        popen = subprocess.Popen(
            [
                *(sys.executable, "-m", "setpoint.launch.child.rank"),
                *map(str, (theirs.fileno(), memory, rank)),
            ],
            env=with_gpus(os.environ, [gpu]),
            stdin=subprocess.PIPE,  # it closes with this process, and the rank ends
            pass_fds=[theirs.fileno(), memory],
        )
    return RankProcess(popen, Connection(ours.detach()))
