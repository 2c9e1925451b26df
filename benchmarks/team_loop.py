"""Simulates a loop of a captured step on any number of threads: when each thread enters, how the
memory is shared, what opening and closing the loop costs. It follows ``Team`` and ``for_units`` of
kernels/cpu/base/threads.h and knows nothing of models.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

CHIPLET = 8
"""Cores that share a last-level cache (Zen 4)."""


@dataclass(frozen=True)
class Machine:
    """Rates in units per second."""

    core_flops: float
    core_bytes: float
    """Bytes that one core reads from memory."""
    socket_bytes: float
    """Bytes that all cores together read from memory."""
    cache_bytes: float
    """Bytes that one core reads from its own caches."""

    def read_bytes(self, threads: int) -> float:
        """The bytes of each thread if ``threads`` read from memory together."""
        return min(self.core_bytes, self.socket_bytes / threads)


@dataclass(frozen=True)
class Barrier:
    """What opening and closing a loop costs: the time that a cache line takes from core to core,
    within a chiplet and beyond, and the time of the instructions. Retries of threads that write to
    one line at once are not counted."""

    near_s: float
    far_s: float
    own_s: float
    tree: bool = False
    """Whether threads wake and await each other in a tree and take no units from others, which has
    not been built."""

    def hop(self, threads: int) -> float:
        """The mean time to get a cache line, over the cores that may have it."""
        near = min(1.0, CHIPLET / threads)
        return near * self.near_s + (1 - near) * self.far_s

    def entry(self, thread: int, threads: int) -> float:
        """Seconds from the beginning of the loop until this thread takes its first unit: all
        threads wait for the cache line that opens the loop, and write to it one after another."""
        if thread == 0:
            return 0.0
        before = math.ceil(math.log2(thread + 1)) if self.tree else thread
        return (1 + before) * self.hop(threads)

    def end(self, threads: int, inside: int) -> float:
        """Seconds from the end of the last unit to the end of the loop: every thread looks for
        units of all others, then those inside leave one after another, which the first thread
        observes."""
        if self.tree:
            waits = math.ceil(math.log2(inside)) + 1
        else:
            waits = threads - 1 + inside - 1 + (inside > 1)
        return self.own_s + waits * self.hop(threads)


FREE = Barrier(0.0, 0.0, 0.0)
OWN_S = 120e-9
"""With five cache lines, the cost of a loop on two threads in both states of the machine that was
measured: 0.30 µs where a line takes 37 ns, 0.90 µs where it takes 156 (docs/notebook.md)."""


def loop(
    units: Sequence[float], threads: int, barrier: Barrier, speed: Callable[[int], float]
) -> float:
    """The seconds of a loop in which the next free thread takes each unit. A thread that enters
    when no unit is left takes no part.

    All threads inside work equally fast, so they share one clock of work done: a unit of size u
    that begins at w ends at w + u.
    """
    entries = [barrier.entry(thread, threads) for thread in range(threads)]
    now, worked, taken, inside = 0.0, 0.0, 0, 0
    ends: list[float] = []
    while taken < len(units) or ends:
        pace = speed(len(ends)) if ends else 1.0
        end = now + (ends[0] - worked) / pace if ends else math.inf
        entry = entries[inside] if inside < threads and taken < len(units) else math.inf
        if end <= entry:
            worked, now = heapq.heappop(ends), end
        else:
            worked, now, inside = worked + (entry - now) * pace * bool(ends), entry, inside + 1
        if taken < len(units):
            heapq.heappush(ends, worked + units[taken])
            taken += 1
    return now + barrier.end(threads, inside)


def even(units: int) -> tuple[float, ...]:
    return (1 / units,) * units


def empty_loop(threads: int, barrier: Barrier) -> float:
    """The seconds that a loop with one equal unit for each thread takes in addition to its work."""
    unit = 1e-3
    return loop(even(threads), threads, barrier, lambda _: 1 / threads / unit) - unit
