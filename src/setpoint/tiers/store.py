"""The interface of a store of blocks, and what all stores count."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from setpoint.core.errors import SetpointError

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]


class StoreError(SetpointError):
    """A store cannot be used, or does not answer."""


@dataclass(slots=True)
class StoreCounts:
    """What a store has seen since it was opened."""

    damaged: int = 0
    """Blocks whose bytes were not those that were written: each was a miss, and was removed."""
    evicted: int = 0
    """Blocks that were removed because of the limits on size, free space and age."""
    refused: int = 0
    """Blocks that were not written: no space, or the store could not."""


class Store(Protocol):
    """Blocks of bytes by name. Threads may call every method at the same time. A store never
    returns bytes that differ from those that were put under the name: whatever is damaged, cut or
    foreign is a miss. Raises StoreError if the store does not answer."""

    counts: StoreCounts

    def sweep(self) -> None:
        """Do what takes time after opening. Called once, by the thread that loads."""

    def num_leading(self, keys: Sequence[bytes]) -> int:
        """How many of these blocks the store has before the first one that it does not have."""
        ...

    def get(self, key: bytes) -> Bytes | None: ...

    def put(self, key: bytes, data: Bytes) -> int:
        """Keep a block. Returns the number of bytes written; 0 if the store has it already or has
        no room."""
        ...

    def clear(self) -> int:
        """Remove all blocks that this process may remove. Returns their number."""
        ...

    def size(self) -> tuple[int, int]:
        """(number of blocks, their bytes), as far as they are known without waiting."""
        ...

    def close(self) -> None: ...
