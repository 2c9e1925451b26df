"""Measures the highest rates of this machine: bytes read in order and products in registers, per
second (limits.cpp).

The rates are those of a given number of threads together. This module does not know what they are
compared with.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from setpoint.engine.kernels.cpu.library import Kernels, load
from setpoint.engine.kernels.host_memory import in_huge_pages
from setpoint.engine.kernels.ops import KernelsUnavailable

PRODUCTS = {"float32": 0, "bfloat16": 1, "int8": 2}
"""Numbers of the types in C++ (limits.cpp, setpoint_multiply)."""
SMALLEST, LARGEST = 1 << 20, 1 << 29
"""Least and most bytes of a block: a smaller one would measure the first-level cache, and one of
more than half a GiB is read no slower."""
SECONDS = 0.3
"""Seconds for each measurement; its fastest run counts."""
CPU_SECONDS = 0.1
"""Seconds of one thread for the same, if other programs take the processor."""
UNDISTURBED = 0.8
"""Share of the threads' time that they have on an idle machine; they spin while they wait."""
ROUNDS = 100_000
"""Rounds of products in a run. It takes about a millisecond, so that the start of a parallel region
is negligible."""


class CpuPeakRates:
    """Implements ``bench.breakdown.PeakRates``; each figure is measured when it is first asked
    for."""

    def __init__(self, kernels: Kernels, threads: int) -> None:
        self._kernels = kernels
        self._threads = threads
        self._reads: dict[int, float] = {}
        self._flops: dict[str, float] = {}

    def read_bytes_per_s(self, num_bytes: int) -> float:
        """Rate of reading a block repeatedly, from a cache if it fits there. Its size is the
        largest power of two that does not exceed ``num_bytes``."""
        size = 1 << min(max(num_bytes, SMALLEST), LARGEST).bit_length() - 1
        if size not in self._reads:
            block = in_huge_pages((size,), torch.uint8).zero_()
            seconds, _ = fastest(
                lambda threads: self._kernels.read_memory(block.data_ptr(), size, threads),
                self._threads,
            )
            self._reads[size] = size / seconds
        return self._reads[size]

    def flops(self, product: str) -> float:
        """Multiplications and additions per second of products of this type. A type without kernels
        counts as float32, and so does bfloat16 on processors where that is faster."""
        if product not in self._flops:
            number = PRODUCTS.get(product, PRODUCTS["float32"])
            rounds = ROUNDS * self._threads  # of all threads together
            operations = self._kernels.multiply(number, 1, self._threads) * rounds
            seconds, _ = fastest(
                lambda threads: self._kernels.multiply(number, rounds // threads, threads),
                self._threads,
            )
            measured = operations / seconds
            if product == "bfloat16":
                measured = max(measured, self.flops("float32"))
            self._flops[product] = measured
        return self._flops[product]

    def measured(self) -> dict[str, Any]:
        return {
            "threads": self._threads,
            "read_bytes_per_s": dict(sorted(self._reads.items())),
            "flops": dict(self._flops),
        }


def machine_limits(device: str, *, threads: int) -> CpuPeakRates | None:
    """The limits of this machine; None for a device or a machine that the kernels do not
    support."""
    if device != "cpu":
        return None
    try:
        return CpuPeakRates(load(), threads)
    except KernelsUnavailable:
        return None


def fastest(run: Callable[[int], object], threads: int) -> tuple[float, bool]:
    """(seconds of the fastest ``run(threads)``; whether the threads had the processor for
    themselves).

    If they had not, they have hardly ever run at the same time, and each has waited for the others
    while these had no core. The processor time of ``run(1)`` does not depend on that; the threads
    are then taken to share it evenly, which is too fast where all of them together reach the
    memory's bandwidth.
    """
    began, had = time.perf_counter(), time.process_time()
    best = _best(lambda: run(threads), time.perf_counter, SECONDS)
    spent = (time.perf_counter() - began) * threads
    if time.process_time() - had >= UNDISTURBED * spent:
        return best, True
    return min(best, _best(lambda: run(1), time.thread_time, CPU_SECONDS) / threads), False


def _best(run: Callable[[], object], clock: Callable[[], float], seconds: float) -> float:
    """Seconds of the fastest of the runs that fit into so many seconds; there is at least one."""
    best, end = float("inf"), clock() + seconds
    while True:
        begin = clock()
        run()
        now = clock()
        best = min(best, now - begin)
        if now >= end:
            return best
