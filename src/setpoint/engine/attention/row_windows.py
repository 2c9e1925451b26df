"""What a row's tokens see of its pages: those of the window of its first token on.

The entries of a page table before a row's window are undefined, and libraries read the pages that
they skip later. Attention does not depend on where a row begins, so a row is given without them.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch

Lengths = TypeVar("Lengths", "np.ndarray", torch.Tensor)


def first_pages(kv_lens: Lengths, counts: Lengths, window: int | None, page_size: int) -> Lengths:
    """The first page that each row sees, [n]. kv_lens, counts: [n], its positions and tokens."""
    if window is None:
        return kv_lens * 0
    return (kv_lens - counts - window + 1).clip(0) // page_size
