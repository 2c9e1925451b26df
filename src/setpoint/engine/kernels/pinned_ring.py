"""Host memory through which data goes to a device and comes back without the host's or the device's
waiting for each copy: a ring of pinned blocks, each used again once the device has done with it.

A device copies from and to pinned memory by itself. Other memory takes a detour through a buffer of
the driver, and the host waits meanwhile.
"""

from __future__ import annotations

import torch

from setpoint.engine.kernels.device import Mark, marker, pinned, reading_is_free, wait

BLOCK_BYTES = 1 << 26
"""Bytes of a block. Copies of a few megabytes already reach the speed of the bus."""
BLOCKS = 2
"""One that the device copies, and one that the host writes or reads."""


class PinnedRing:
    """Contract: after ``take``, enqueue what the device does with the block, then call
    ``enqueued``. For one thread at a time."""

    def __init__(self, device: torch.device, num_bytes: int = BLOCK_BYTES) -> None:
        self.num_bytes = num_bytes
        """Bytes of a block."""
        self._blocks = [
            pinned(torch.empty(num_bytes, dtype=torch.uint8), device) for _ in range(BLOCKS)
        ]
        self._done: list[Mark | None] = [None] * BLOCKS
        """When the device has done with each block."""
        self._turn = 0
        self._mark = marker(device)

    def take(self) -> torch.Tensor:
        """The next block, uint8 [num_bytes], of which the device needs nothing any more."""
        self._turn = (self._turn + 1) % BLOCKS
        self._wait(self._turn)
        return self._blocks[self._turn]

    def enqueued(self) -> Mark:
        """Note that the device is done with the block at the present point of its work, which is
        returned."""
        mark = self._done[self._turn] = self._mark()
        return mark

    def wait(self) -> None:
        """Wait until the device is done with all blocks."""
        for turn in range(BLOCKS):
            self._wait(turn)

    def _wait(self, turn: int) -> None:
        mark = self._done[turn]
        if mark is not None:
            wait(mark)


class WeightCopies:
    """Copies the host's tensors to where a model is. On a CPU they are there already."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ring: PinnedRing | None = None

    def fill(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Write the host's ``source`` to ``to``, of the same shape, converted to its dtype. On
        another device ``to`` is contiguous, and complete once the device has reached this point."""
        if reading_is_free(self._device):
            to.copy_(source)
            return
        if self._ring is None:
            self._ring = PinnedRing(self._device)
        ring, row_bytes = self._ring, to[:1].nbytes
        assert row_bytes <= ring.num_bytes, "a row that is larger than a block"
        count = ring.num_bytes // max(row_bytes, 1)
        for begin in range(0, len(to), count):
            part = to[begin : begin + count]
            block = ring.take()[: part.nbytes].view(to.dtype).view(part.shape)
            block.copy_(source[begin : begin + count])
            copy_later(part, block)
            ring.enqueued()

    def send(self, source: torch.Tensor) -> torch.Tensor:
        """The host's tensor on the device; on a CPU, itself."""
        if reading_is_free(self._device):
            return source
        sent = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        self.fill(sent, source)
        return sent


def copy_later(to: torch.Tensor, source: torch.Tensor) -> None:
    """Have the device copy between its memory and a pinned block, in the order of its work."""
    to.copy_(source, non_blocking=True)
