"""Measures the implementations of a product that give the same bits, and chooses the fastest one
for each class of row counts.

That takes some milliseconds, measured as CPU time of one thread. An implementation that gives other
bits on this processor for any number of rows is chosen for none.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from setpoint.engine.kernels.cpu.calls import Int8LinearCall, LinearCall
from setpoint.engine.kernels.cpu.choices import CLASS_ROWS, Chooser, TunedProduct

PROBED_ROWS = (1, 6, 24, 96)
"""Number of rows with which each class is measured."""
K, COLUMNS = 1024, 256
"""Shape of the weight that is measured. It has half a MiB in bf16, which stays in the second-level
cache, because only the instructions are to be compared."""
BUDGET_S = 0.05
"""Seconds of CPU time for all measurements. A product that is not measured within them keeps its
first implementation."""
ROUNDS = 5
"""Runs of each implementation, alternately; the fastest one counts."""
LEAST_S = 100e-6
"""Length of a run in seconds: many times the resolution of the clock."""
MOST_REPEATS = 1000
"""Most calls within a run. On a clock with a low resolution, a call may seem to take no time."""
WORTHWHILE = 0.95
"""Another implementation is chosen if it takes less than this share of the first one's time."""


def measure(kernels: Chooser) -> tuple[TunedProduct, ...]:
    """A choice for each product that has several implementations, for each class of rows."""
    several = {name: found for name, found in kernels.implementations.items() if len(found) > 1}
    end = time.thread_time() + BUDGET_S
    seconds = {
        (rows, product): _times(kernels, product, size_class, end)
        for size_class, rows in enumerate(CLASS_ROWS)
        for product in several
    }
    for (_, product), found in seconds.items():
        for i, each in enumerate(found or ()):
            if math.isinf(each):
                for (_, other), same in seconds.items():
                    if other == product and same is not None:
                        same[i] = math.inf
    return tuple(
        _choice(product, rows, several[product], found)
        for (rows, product), found in seconds.items()
    )


def _choice(
    product: str, most_rows: int | None, names: list[str], seconds: list[float] | None
) -> TunedProduct:
    if seconds is None:
        return TunedProduct(product, most_rows, names[0], {})
    best = min(range(len(names)), key=seconds.__getitem__)
    if seconds[best] > WORTHWHILE * seconds[0]:
        best = 0
    others = {
        name: round(each / seconds[best], 3) if math.isfinite(each) else None
        for i, (name, each) in enumerate(zip(names, seconds, strict=True))
        if i != best
    }
    return TunedProduct(product, most_rows, names[best], others)


def _times(kernels: Chooser, product: str, size_class: int, end: float) -> list[float] | None:
    """Seconds of a call with each implementation, infinite for one whose result differs from that
    of the first; None if the thread's CPU time reaches ``end``, or if its clock did not advance."""
    run, out = _PRODUCTS[product](kernels, PROBED_ROWS[size_class])
    fastest = [math.inf] * len(kernels.implementations[product])
    results = []
    repeats = 1
    for turn in range(ROUNDS + 1):
        longest = 0.0
        for implementation in range(len(fastest)):
            if time.thread_time() > end:
                return None
            kernels.choose(product, size_class, implementation)
            begin = time.thread_time()
            for _ in range(repeats):
                run()
            each = (time.thread_time() - begin) / repeats
            longest = max(longest, each)
            if turn:  # the first turn only loads the weight and the code into the caches
                fastest[implementation] = min(fastest[implementation], each)
            else:
                results.append(out.tobytes())
        repeats = min(math.ceil(LEAST_S / max(longest, 1e-9)), MOST_REPEATS)
    if not all(fastest):
        return None
    return [
        each if result == results[0] else math.inf
        for each, result in zip(fastest, results, strict=True)
    ]


def _bf16(rows: int, columns: int) -> npt.NDArray[np.uint16]:
    """Random bf16 numbers of both signs from 2^-27 to 2, as their bits: [rows, columns]."""
    drawn = np.random.default_rng(rows).integers(0, 1 << 16, (rows, columns), np.uint16)
    return _align(drawn & 0x8FFF | np.uint16(100 << 7))


def _align(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A copy that is aligned to cache lines, as the engine's weights are."""
    room = np.empty(values.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    copy = room[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


def _bf16_product(kernels: Chooser, rows: int) -> tuple[Callable[[], None], npt.NDArray[Any]]:
    weight, x, out = _bf16(COLUMNS, K), _bf16(rows, K), np.zeros((rows, COLUMNS), np.uint16)
    call = LinearCall(
        x=x.ctypes.data,
        weight=weight.ctypes.data,
        out=out.ctypes.data,
        rows=rows,
        columns=COLUMNS,
        k_words=K // 2,
        out_row=COLUMNS,
        dtype=1,
        threads=1,
    )
    return partial(_run, kernels.linear, call, (weight, x)), out


def _int8_product(kernels: Chooser, rows: int) -> tuple[Callable[[], None], npt.NDArray[Any]]:
    weight = _align(np.random.default_rng(1).integers(-127, 128, (COLUMNS, K), np.int8))
    scales, shifts = np.ones(COLUMNS, np.float32), np.zeros(COLUMNS, np.int32)
    x, out = _bf16(rows, K), np.zeros((rows, COLUMNS), np.uint16)
    call = Int8LinearCall(
        x=x.ctypes.data,
        weight=weight.ctypes.data,
        scales=scales.ctypes.data,
        shifts=shifts.ctypes.data,
        out=out.ctypes.data,
        rows=rows,
        columns=COLUMNS,
        k=K,
        k_words=K // 4,
        rotated=1,
        dtype=1,
        threads=1,
    )
    return partial(_run, kernels.linear_int8, call, (weight, scales, shifts, x)), out


def _run(kernel: Callable[[int], None], call: ctypes.Structure, _held: Any) -> None:
    """Run the kernel. _held: the arrays whose addresses are in the call, to keep them alive."""
    kernel(ctypes.addressof(call))


_PRODUCTS = {"bf16": _bf16_product, "int8": _int8_product}
