"""Memory that stays as long as the engine does: weights, the KV pool, the tensors of captured steps.

A step reads nearly all of it, in order. In pages of 4 KiB a processor spends a good part of that time on looking addresses up
(docs/notebook.md), so on a CPU this memory asks for huge pages, which Linux gives to whole, aligned pieces only. Knows nothing of what is
kept there.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref

import torch

HUGE_PAGE = 1 << 21
"""Bytes: on x86-64, and on aarch64 with its usual pages."""
PIECE = 1 << 26
"""Bytes that are mapped at once and hold, side by side, the tensors that are claimed one after another."""
ALIGNMENT = 64

_CPU = torch.device("cpu")
_newest: tuple[weakref.ref[mmap.mmap], int, int] | None = None
"""The newest mapping, which goes with the last tensor on it, and the offsets between which it is free. Written by ``claim``."""


def claim(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device = _CPU) -> torch.Tensor:
    """Memory of any content. Raises RuntimeError if there is not enough.

    On a CPU it is only mapped here and taken as it is written: touching gigabytes of a KV pool first would be most of the start-up
    time, and the memory plan has counted them. On a GPU an allocation takes at once.
    """
    global _newest
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    memory, begin, end = (None, 0, 0) if _newest is None else (_newest[0](), *_newest[1:])
    if memory is None or end - begin < num_bytes:
        memory, begin, end = _mapped(max(PIECE, num_bytes))
    _newest = weakref.ref(memory), begin + -(-num_bytes // ALIGNMENT) * ALIGNMENT, end
    return torch.frombuffer(memory, dtype=torch.uint8)[begin : begin + num_bytes].view(dtype).view(shape)


def _mapped(num_bytes: int) -> tuple[mmap.mmap, int, int]:
    """-> a new mapping and the offsets of the whole huge pages in it, at least ``num_bytes``."""
    size = math.ceil(num_bytes / HUGE_PAGE) * HUGE_PAGE
    try:
        memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise RuntimeError(f"there is no memory of {num_bytes} bytes: {error}") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them: its pages do as well, slower
            memory.madvise(mmap.MADV_HUGEPAGE)
    begin = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE_PAGE
    return memory, begin, begin + size
