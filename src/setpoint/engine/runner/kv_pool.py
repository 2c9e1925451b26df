"""The paged KV pool: one block of device memory, and for each layer a view of the pages of each of
its parts (``ModelSpec.cache_parts``).

A slab has room for the parts of one layer per page, one part after the other. Layers of different
cache groups share a slab, in which each has pages of its own (``core.cachegroups``).
"""

from __future__ import annotations

import math

import torch

from setpoint.core.cachegroups import CacheLayout
from setpoint.core.errors import OutOfMemoryError
from setpoint.engine.kernels.device import claim, lack_of
from setpoint.engine.kernels.host_memory import let_go


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
        self._pages = (num_pages + 1, page_size)
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
        shapes = [(*self._pages, part.heads, part.size) for part in self.layout.parts]
        sizes = [math.prod(shape) for shape in shapes]
        try:
            self.memory = claim((self.layout.num_slabs, sum(sizes)), self._dtype, self.device)
        except torch.OutOfMemoryError as error:
            lack = lack_of(error, self.device)
            raise OutOfMemoryError(
                f"No memory on {self.device} for a KV pool of {self._pages[0] - 1} pages of"
                f" {self._pages[1]} tokens: {lack.why}. End what else uses the device, or start"
                f" with a --mem-fraction-static that is {lack.less_static} lower."
            ) from None
        except RuntimeError as error:
            raise OutOfMemoryError(
                f"No memory on {self.device} for a KV pool of {self._pages[0] - 1} pages of"
                f" {self._pages[1]} tokens: {error}"
            ) from None
        self.slabs = tuple(
            tuple(part.view(shape) for part, shape in zip(slab.split(sizes), shapes, strict=True))
            for slab in self.memory
        )
        """The parts of each slab, each [num_pages + 1, page_size, heads, size], contiguous."""
        self.layers = tuple(self.slabs[slab] for slab in self._slab_of)
        """The parts of each layer's slab."""

    def release(self) -> None:
        """Give the memory back, until ``take``."""
        self.memory, self.slabs, self.layers = self.memory.new_empty(0), (), ()

    def let_go(self) -> None:
        """Give the memory back, but not its addresses; the content is lost. Only on a CPU."""
        let_go(self.memory)

    @property
    def num_bytes(self) -> int:
        return self.memory.nbytes
