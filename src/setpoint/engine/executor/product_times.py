"""Times products with weights of given kinds, without a model: the matrices are random and of the
size that the model's have, and together as large as what a step reads, so that they lie in a cache
only if the model would.

A bandwidth alone would promise too much: codes of 4 bits must be converted for every row block.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle

import torch

from setpoint.core.model import BLOCK_KINDS
from setpoint.engine.executor.build_runner import DTYPES
from setpoint.engine.quant.linear_method import (
    Blocks,
    PackedWeight,
    choose_blocks,
    choose_linear,
)

ROWS = (1, 16, 64)
"""Numbers of rows that are measured."""
SECONDS = 0.3
"""Seconds for each of them; the fastest product counts, as in ``kernels.cpu.limits``."""
ATTEMPTS = 4
"""Times that a number of rows is measured at most, while other programs take the processor."""
UNDISTURBED = 0.8
"""Share of the threads' time that they have on an idle machine; they spin while they wait."""
LARGEST_BYTES = 1 << 28
"""Most bytes of the matrices of a kind: larger than the caches of most machines."""
MULTIPLE = 256
"""Columns and rows are rounded up to a multiple of the largest block."""


def product_times(
    kinds: Iterable[str], *, dtype: str, shape: tuple[int, int], step_bytes: int, threads: int
) -> tuple[dict[str, dict[int, float]], bool]:
    """(kind -> rows -> seconds for each parameter; whether other programs took a good part of the
    processor meanwhile). shape: (outputs, inputs) of a usual matrix of the
    model. step_bytes: bytes of all weights that a step reads. Raises ConfigError for a kind that
    does not run here."""
    if threads:
        torch.set_num_threads(threads)
    size = min(step_bytes, LARGEST_BYTES)
    found, disturbed = {}, False
    for kind in kinds:
        outputs, inputs = (-(-each // MULTIPLE) * MULTIPLE for each in shape)
        weights = list(_weights(kind, DTYPES[dtype], (outputs, inputs), size))
        curve = {}
        for rows in ROWS:
            seconds, alone = _undisturbed(weights, torch.randn(rows, inputs).to(DTYPES[dtype]))
            curve[rows] = seconds / (outputs * inputs)
            disturbed |= not alone
        found[kind] = curve
    return found, disturbed


def _undisturbed(weights: Sequence[PackedWeight], x: torch.Tensor) -> tuple[float, bool]:
    """(seconds of the fastest product of x; whether the threads had the processor for themselves in
    at least one of the attempts, of which there are as many as that takes, up to ATTEMPTS)."""
    best = math.inf
    for _ in range(ATTEMPTS):
        began, had = time.perf_counter(), time.process_time()
        best = min(best, _best(weights, x))
        spent = (time.perf_counter() - began) * torch.get_num_threads()
        if time.process_time() - had >= UNDISTURBED * spent:
            return best, True
    return best, False


def _best(weights: Sequence[PackedWeight], x: torch.Tensor) -> float:
    """Seconds of the fastest product of x in SECONDS with one of the weights after the other."""
    best, end = float("inf"), time.perf_counter() + SECONDS
    for weight in cycle(weights):
        began = time.perf_counter()
        weight(x)
        now = time.perf_counter()
        best = min(best, now - began)
        if now >= end:
            break
    return best


def _weights(
    kind: str, dtype: torch.dtype, shape: tuple[int, int], size: int
) -> Iterator[PackedWeight]:
    """Weights of this shape that have ``size`` bytes together; at least one."""
    device, taken = torch.device("cpu"), 0
    blocks = choose_blocks(device, dtype) if kind in BLOCK_KINDS else None
    plain = choose_linear(device, dtype, "w8a8_int8" if kind == "int8" else None).impl
    while taken < size:
        if blocks is None:
            weight = plain.pack(torch.randn(shape).to(dtype), None)
        else:
            row_bytes = BLOCK_KINDS[kind].row_bytes(shape[1])
            # Small bytes, so that every scale is a finite float16.
            codes = torch.randint(0, 0x40, (shape[0], row_bytes), dtype=torch.uint8)
            weight = blocks.pack_stack([Blocks(kind, codes)], None)
        taken += weight.num_bytes
        yield weight
