"""What it costs the ranks of a model to gather outputs (kernels/cpu/step/ranks.cpp): measured
between two processes on two cores, and simulated for a rank on each of several sockets.
"""

from __future__ import annotations

import math
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from team_loop import Barrier, even, loop

SOURCES = Path(__file__).parents[1] / "src/setpoint/engine/kernels/cpu"
WORTH_IT = 4096
"""threads.h, ``for_rows`` inside a team."""


@dataclass(frozen=True)
class Measured:
    """One size of an exchange."""

    rows: int
    row_bytes: int
    least_s: float
    median_s: float

    @property
    def num_bytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class Between:
    """What is between two ranks, and on each of them."""

    line_s: float
    """The time of a cache line from one to the other."""
    link_bytes: float
    """Bytes per second that a rank reads from the others."""
    threads: int
    """Number of threads of each rank."""
    barrier: Barrier
    """What it costs to open and close a loop on these threads."""


@dataclass(frozen=True)
class Gather:
    """What a gather costs, by what it cost two processes of one thread each that did nothing else.

    All of it is waiting for cache lines that another core has written or read: those of the data,
    half of them written and half of them read, and those of the arrivals. So all of it takes as
    many times longer as a cache line does, and the data counts once for any number of ranks: each
    writes its part and reads those of the others.
    """

    measured: Sequence[Measured]
    line_s: float
    """The time of a cache line between the two cores."""

    @cached_property
    def points(self) -> list[tuple[int, float]]:
        """Bytes of the whole rows -> seconds, in ascending order. A larger exchange that took less
        time was disturbed less."""
        found, least = [], math.inf
        for each in sorted(self.measured, key=lambda each: -each.num_bytes):
            least = min(least, each.least_s)
            found.append((each.num_bytes, least))
        return found[::-1]

    def seconds(self, rows: int, row_bytes: int, ranks: int, between: Between) -> float:
        """A gather of rows that are ``row_bytes`` long on all ranks together."""
        slower, num_bytes = between.line_s / self.line_s, rows * row_bytes
        least = self.points[0][1]
        data = max(self._alone(num_bytes) - least, 0.0) * slower
        arrivals = least * slower + (ranks - 2) * between.line_s
        others, part = ranks - 1, row_bytes // ranks
        units = -(-rows // (WORTH_IT // 2 // part + 1)) if rows * part >= WORTH_IT else 1
        written, read = data / ranks, data * others / ranks
        if between.threads > 1 and units > 1:
            read = self._divided(read, units * others, num_bytes * others / ranks, between)
            written = self._divided(written, units, 0, between)
        return arrivals + written + max(read, num_bytes * others / ranks / between.link_bytes)

    def _divided(self, seconds: float, units: int, num_bytes: float, between: Between) -> float:
        """Work of so many seconds on one thread, as a loop on all that reads from the others."""
        limit = num_bytes / between.link_bytes

        def speed(active: int) -> float:
            return 1 / max(seconds, limit * active)

        return loop(even(units), between.threads, between.barrier, speed)

    def _alone(self, num_bytes: int) -> float:
        """The measured seconds; between two sizes and beyond the last one in proportion."""
        for (before, begin), (after, end) in pairwise(self.points):
            if num_bytes <= after:
                return begin + (end - begin) * (num_bytes - before) / (after - before)
        last, seconds = self.points[-1]
        return seconds * num_bytes / last


def measure(sizes: Sequence[tuple[int, int]]) -> Gather:
    """Time exchanges of these sizes (rows, bytes of a row) between two processes on the first two
    cores that this one may use."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "gathers"
        flags = ["-std=c++17", "-O2", "-fopenmp", "-I", str(SOURCES)]
        sources = [str(Path(__file__).with_suffix(".cpp")), str(SOURCES / "ranks.cpp")]
        subprocess.run(["g++", *flags, *sources, "-o", str(program)], check=True)
        out = subprocess.run(
            [program, *map(str, cores), *(f"{rows}:{size}" for rows, size in sizes)],
            check=True,
            capture_output=True,
            text=True,
        )
    first, *lines = out.stdout.splitlines()
    found = []
    for line in lines:
        rows, size, least, median = map(int, line.split())
        found.append(Measured(rows, size, least / 1e9, median / 1e9))
    return Gather(found, float(first) / 2e9)
