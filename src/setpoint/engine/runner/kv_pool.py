"""The paged KV pool: one block of device memory, and for each layer a view of its K and V pages.

A slab has room for the K and V of one layer per page. Layers of different cache groups share a
slab, in which each has pages of its own (``core.cachegroups``).
"""

from __future__ import annotations

import torch

from setpoint.core.cachegroups import CacheLayout
from setpoint.core.errors import OutOfMemoryError
from setpoint.engine.kernels.device import claim


class KVPool:
    """Page 0 is the dummy page, which nobody owns; the scheduler hands out pages 1..num_pages."""

    def __init__(
        self,
        layout: CacheLayout,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        parts, heads, head_dim = layout.groups[0].shape
        self._shape = (layout.num_slabs, parts, num_pages + 1, page_size, heads, head_dim)
        self._dtype = dtype
        self.device = device
        self.layout = layout
        self.num_tokens = num_pages * page_size
        """Number of pool tokens (``core.pagerows``) that the pages hold."""
        places = layout.places()
        self._slab_of = tuple(places[layer][1] for layer in range(len(places)))
        """The slab of each layer."""
        self.group_of = tuple(places[layer][0] for layer in range(len(places)))
        """The cache group of each layer."""
        self.take()

    def take(self) -> None:
        """Allocate the pool's memory, whose content is undefined. Raises OutOfMemoryError."""
        try:
            self.memory = claim(self._shape, self._dtype, self.device)
        except RuntimeError as error:
            raise OutOfMemoryError(
                f"No memory on {self.device} for a KV pool of {self._shape[2] - 1} pages of"
                f" {self._shape[3]} tokens: {error}"
            ) from None
        self.slabs = tuple((slab[0], slab[1]) for slab in self.memory)
        """K and V of each slab, each [num_pages + 1, page_size, Hkv, D], contiguous."""
        self.layers = tuple(self.slabs[slab] for slab in self._slab_of)
        """K and V of each layer's slab."""

    def release(self) -> None:
        """Give the memory back, until ``take``."""
        self.memory, self.slabs, self.layers = self.memory.new_empty(0), (), ()

    @property
    def num_bytes(self) -> int:
        return self.memory.nbytes
