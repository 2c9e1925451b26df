"""What engines that compute in step (DP attention, decision 0069) inherit from the process that
starts them: memory for their exchanges, and a bell for each, with which the others wake it up.

Both have no name, so nothing is left whatever ends the engines.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

MEMORY_BYTES = 8 << 20
"""Size of the memory. Exchanges that need more than half of it are made in several parts."""


def new_memory(size: int) -> list[int]:
    """New memory for as many engines, as the file descriptors of the memory and of the bells."""
    memory = os.memfd_create("setpoint-engines")
    os.ftruncate(memory, MEMORY_BYTES)
    return [memory, *(os.eventfd(0, os.EFD_NONBLOCK) for _ in range(size))]


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
