"""Copies pages between a device's pool and the host's memory, beside the steps: on a stream of
their own, through pinned blocks, so that no step waits for them.

A caller waits for its own copy. What it reads was computed by steps whose results are back. What it
writes may lie where a step in flight still reads a page that a window has passed, so the device
begins each copy after the steps that it was given before.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from setpoint.core.request import Ids
from setpoint.engine.kernels.device import Mark, beside_steps, side_stream, to_device, wait
from setpoint.engine.kernels.pinned_ring import BLOCKS, PinnedRing, copy_later

BLOCK_BYTES = 1 << 23
"""Bytes of a block: some hundred pages of a part of a layer."""

Bytes = npt.NDArray[np.uint8]


class PageCopies:
    """The copies of one direction. Call ``read`` and ``write`` within ``turn``."""

    def __init__(self, device: torch.device, page_bytes: int) -> None:
        """page_bytes: of the largest page of a part of a layer."""
        self._device = device
        self._ring = PinnedRing(device, max(BLOCK_BYTES, page_bytes))
        self._stream = side_stream(device)
        self._turn = threading.Lock()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """A block of copies, which begin when the device has done its steps of before. Threads take
        turns."""
        with self._turn, beside_steps(self._device, self._stream):
            yield

    def read(self, part: torch.Tensor, pages: Ids, out: Bytes) -> None:
        """Copy these pages of ``part`` [pages, bytes] to ``out`` [n, bytes]."""
        under_way: deque[tuple[Mark, torch.Tensor, slice]] = deque()

        def take_oldest() -> None:
            copied, block, rows = under_way.popleft()
            wait(copied)
            out[rows] = block.numpy()

        for rows in self._pieces(len(pages), part):
            if len(under_way) == BLOCKS:
                take_oldest()
            found = part.index_select(0, self._sent(pages[rows]))
            block = self._ring.take()[: found.nbytes].view(found.shape)
            copy_later(block, found)
            under_way.append((self._ring.enqueued(), block, rows))
        while under_way:
            take_oldest()

    def write(self, part: torch.Tensor, pages: Ids, data: Bytes) -> None:
        """Copy ``data`` [n, bytes] to these pages of ``part``, without those for page 0. They are
        there when it returns."""
        there = np.flatnonzero(pages)
        for rows in self._pieces(len(there), part):
            which = there[rows]
            shape = len(which), part.shape[1]
            found = torch.empty(shape, dtype=part.dtype, device=part.device)
            block = self._ring.take()[: found.nbytes].view(shape)
            np.take(data, which, axis=0, out=block.numpy(), mode="clip")  # "raise" copies twice
            copy_later(found, block)
            part.index_copy_(0, self._sent(pages[which]), found)
            self._ring.enqueued()
        self._ring.wait()

    def _pieces(self, count: int, part: torch.Tensor) -> Iterator[slice]:
        size = self._ring.num_bytes // part.shape[1]
        return (slice(begin, min(begin + size, count)) for begin in range(0, count, size))

    def _sent(self, pages: Ids) -> torch.Tensor:
        return to_device(pages.astype(np.int64), self._device)
