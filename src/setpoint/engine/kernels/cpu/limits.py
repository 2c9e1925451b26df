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
ROUNDS = 100_000
"""Rounds of products in a run. It takes about a millisecond, so that the start of a parallel region
is negligible."""


class CpuLimits:
    """Implements ``bench.breakdown.Limits``; each figure is measured when it is first asked for."""

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
            self._reads[size] = size / _best(
                lambda: self._kernels.read_memory(block.data_ptr(), size, self._threads)
            )
        return self._reads[size]

    def flops(self, product: str) -> float:
        """Multiplications and additions per second of products of this type. A type without kernels
        counts as float32, and so does bfloat16 on processors where that is faster."""
        if product not in self._flops:
            number = PRODUCTS.get(product, PRODUCTS["float32"])
            operations = self._kernels.multiply(number, 1, self._threads) * ROUNDS * self._threads
            measured = operations / _best(
                lambda: self._kernels.multiply(number, ROUNDS, self._threads)
            )
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


def machine_limits(device: str, *, threads: int) -> CpuLimits | None:
    """The limits of this machine; None for a device or a machine that the kernels do not
    support."""
    if device != "cpu":
        return None
    try:
        return CpuLimits(load(), threads)
    except KernelsUnavailable:
        return None


def _best(run: Callable[[], object]) -> float:
    """Seconds of the fastest of the runs that fit into SECONDS; there is at least one."""
    best, end = float("inf"), time.perf_counter() + SECONDS
    while True:
        begin = time.perf_counter()
        run()
        now = time.perf_counter()
        best = min(best, now - begin)
        if now >= end:
            return best
