"""What engines that compute in step (DP attention, decision 0069) inherit from the process that
starts them: memory for their exchanges, and a bell for each, with which the others wake it up.

Both have no name, so nothing is left whatever ends the engines.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from functools import partial
from types import TracebackType

from setpoint.launch.process import EngineProcess, spawn_child

MEMORY_BYTES = 8 << 20
"""Size of the memory. Exchanges that need more than half of it are made in several parts."""


class SteppingEngines:
    """Starts engines that compute in step; a context manager, whose object is a ``Spawn`` that
    takes the rank. All start together, and again when all have ended: each time with new memory."""

    def __init__(self, size: int, *, stderr: int | None) -> None:
        self._size = size
        self._spawn = partial(spawn_child, num_ranks=1, stderr=stderr)
        self._descriptors: list[int] = []
        """The file descriptors of the memory and of the bells."""
        self._started: set[int] = set()
        """The ranks that have them."""

    def __enter__(self) -> SteppingEngines:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def __call__(self, rank: int | None) -> EngineProcess:
        assert rank is not None
        if not self._descriptors or rank in self._started:
            self._renew()
        self._started.add(rank)
        return self._spawn(None, inherits=self._descriptors)

    def _renew(self) -> None:
        self._close()
        memory = os.memfd_create("setpoint-engines")
        self._descriptors.append(memory)
        os.ftruncate(memory, MEMORY_BYTES)
        self._descriptors += (os.eventfd(0, os.EFD_NONBLOCK) for _ in range(self._size))

    def _close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())
        self._started.clear()


def mapped(inherited: Sequence[int]) -> mmap.mmap:
    """The memory that an engine has inherited."""
    return mmap.mmap(inherited[0], MEMORY_BYTES)


def bell_of(inherited: Sequence[int], rank: int) -> int:
    """The descriptor of a rank's bell, an eventfd."""
    return inherited[1 + rank]


def ring(inherited: Sequence[int], rank: int) -> None:
    """Wake up all engines but this one, of this rank."""
    for other, bell in enumerate(inherited[1:]):
        if other != rank:
            os.eventfd_write(bell, 1)
