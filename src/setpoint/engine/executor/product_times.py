"""Times products with weights of given kinds, without a model: the matrices are random and of the
size that the model's have, and together as large as what a step reads, so that they lie in a cache
only if the model would.

A bandwidth alone would promise too much: codes of 4 bits must be converted for every row block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle

import torch

from setpoint.core.model import BLOCK_KINDS
from setpoint.engine.executor.build_runner import DTYPES
from setpoint.engine.kernels.cpu.peak_rates import fastest
from setpoint.engine.quant.linear_method import (
    GgufWeight,
    PackedWeight,
    choose_blocks,
    choose_linear,
)

ROWS = (1, 16, 64)
"""Numbers of rows that are measured, each as ``kernels.cpu.peak_rates`` measures."""
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
            seconds, alone = _seconds(weights, torch.randn(rows, inputs).to(DTYPES[dtype]))
            curve[rows] = seconds / (outputs * inputs)
            disturbed |= not alone
        found[kind] = curve
    return found, disturbed


def _seconds(weights: Sequence[PackedWeight], x: torch.Tensor) -> tuple[float, bool]:
    """(seconds of a product of x; whether the threads had the processor for themselves)."""
    threads, following = torch.get_num_threads(), cycle(weights)

    def run(num_threads: int) -> None:
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        next(following)(x)

    try:
        return fastest(run, threads)
    finally:
        torch.set_num_threads(threads)


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
            weight = blocks.pack_stack([GgufWeight(kind, codes)], None)
        taken += weight.num_bytes
        yield weight
