"""Starts the other ranks of an engine (--tp-size): children of the engine's process, the first
rank.

They share one piece of memory without a name, so nothing of it is left whatever ends them. An
engine and its ranks end together: a rank ends when rank 0 does, and rank 0 ends as the first rank
did, by the same signal, so that whoever supervises the engine judges its end as that of one
process.
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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

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
    """The ranks but the first, as rank 0 sees them."""

    processes: Sequence[RankProcess]
    memory: mmap.mmap
    is_ending: bool = False
    """Whether the engine ends in order."""

    @property
    def size(self) -> int:
        """The number of ranks, the first included."""
        return len(self.processes) + 1

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
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code or 1)


def start_ranks(size: int) -> RankProcesses:
    """Start the ranks 1 to size - 1, which import torch meanwhile and wait for their job."""
    descriptor = os.memfd_create("setpoint-ranks")
    os.ftruncate(descriptor, MEMORY_BYTES)
    try:
        processes = [_start(rank, size, descriptor) for rank in range(1, size)]
        return RankProcesses(processes, mmap.mmap(descriptor, MEMORY_BYTES))
    finally:
        os.close(descriptor)


def _start(rank: int, size: int, memory: int) -> RankProcess:
    ours, theirs = socket.socketpair()
    with theirs:
        popen = subprocess.Popen(
            [
                *(sys.executable, "-m", "setpoint.launch.rank"),
                *map(str, (theirs.fileno(), memory, rank, size)),
            ],
            stdin=subprocess.PIPE,  # it closes with this process, and the rank ends
            pass_fds=[theirs.fileno(), memory],
        )
    return RankProcess(popen, Connection(ours.detach()))
