"""The paged KV pool: one block of device memory, and per layer a view of its K and its V pages."""

from __future__ import annotations

import torch

from setpoint.core.errors import OutOfMemoryError
from setpoint.core.model import ModelSpec
from setpoint.engine.kernels.device import claim


class KVPool:
    """Page 0 is the dummy page that nobody owns; pages 1..num_pages are the scheduler's to hand
    out."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (spec.num_layers, 2, num_pages + 1, page_size, spec.num_kv_heads, spec.head_dim)
        self.num_tokens = num_pages * page_size
        try:
            self.memory = claim(shape, dtype, device)
        except RuntimeError as error:
            raise OutOfMemoryError(
                f"No memory on {device} for a KV pool of {num_pages} pages of {page_size} tokens:"
                f" {error}"
            ) from None
        self.layers = tuple((layer[0], layer[1]) for layer in self.memory)
        """Per layer K and V, each [num_pages + 1, page_size, Hkv, D], contiguous."""

    @property
    def num_bytes(self) -> int:
        return self.memory.nbytes
