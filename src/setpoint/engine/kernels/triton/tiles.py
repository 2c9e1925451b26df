"""How kernels without matrix products are cut into programs. Grids depend on shapes only, so a
graph of a size serves every step of that size; and a row is cut by its own width alone, so its
result has the same bits in every batch.
"""

from __future__ import annotations

import triton

BLOCK = 1024
"""Elements of a program that computes each one on its own: 8 for each thread, which are one or two
loads of 16 bytes."""
SEPARATE = {"enable_fp_fusion": False}
"""Option of every launch: a product is rounded before it is added to anything, as in torch. The
default differs between versions of Triton."""


def blocks(size: int, block: int = BLOCK) -> int:
    """Programs for this many elements."""
    return int(triton.cdiv(size, block))


def width(size: int) -> int:
    """Elements of a block that holds ``size`` of them."""
    return int(triton.next_power_of_2(size))


def warps(elements: int) -> int:
    """Warps of a program that keeps this many elements in registers."""
    return min(max(elements // 512, 1), 16)
