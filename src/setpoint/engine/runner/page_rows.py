"""Page rows (``core.pagerows``) as bytes: copies keys and values out of a pool and into it, in
threads that do not run steps.

The bytes of n rows are [groups][layers of the group][parts][n rows][page][heads][size], without
gaps, in the pool's own dtype and byte order: for each layer and part one run of bytes, whatever the
page size. What a row has no page for (0) is left out on the way in, and undefined on the way out.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from setpoint.core.request import Ids
from setpoint.engine.kernels.device import reading_is_free
from setpoint.engine.runner.kv_pool import KVPool
from setpoint.engine.runner.page_copies import PageCopies

Bytes = npt.NDArray[np.uint8]


class PageRows:
    """The rows of a pool's present memory. Make a new one after ``KVPool.take``."""

    def __init__(self, pool: KVPool) -> None:
        self.width = len(pool.layout.groups)
        parts = [
            [
                part.view(torch.uint8).reshape(len(part), -1)
                for slab, _ in enumerate(group.layers)
                for part in pool.slabs[slab]
            ]
            for group in pool.layout.groups
        ]
        on_cpu = reading_is_free(pool.device)
        largest = max(part.shape[1] for each in parts for part in each)
        self._reading, self._writing = (
            None if on_cpu else PageCopies(pool.device, largest) for _ in range(2)
        )
        self._parts = [[part.numpy() if on_cpu else part for part in each] for each in parts]
        """For each group, its layers' parts: [pages, bytes of one page]."""
        self.row_bytes = sum(part.shape[1] for each in parts for part in each)
        """Bytes of one page row."""

    def read(self, rows: Ids, out: Bytes | None = None) -> Bytes:
        """The bytes of these rows, which are flat; in ``out``, if it is given."""
        table = rows.reshape(-1, self.width)
        if out is None:
            out = np.empty(len(table) * self.row_bytes, np.uint8)
        at = 0
        with nullcontext() if self._reading is None else self._reading.turn():
            for column, parts in enumerate(self._parts):
                pages = table[:, column]
                for part in parts:
                    end = at + len(pages) * part.shape[1]
                    self._read(part, pages, out[at:end].reshape(len(pages), -1))
                    at = end
        return out

    def write(self, rows: Ids, data: Bytes, *, first: int = 0) -> None:
        """Fill these rows from the bytes of ``first`` + as many rows, without the first ones."""
        table = rows.reshape(-1, self.width)
        num_rows, at = first + len(table), 0
        assert len(data) == num_rows * self.row_bytes, "bytes of another number of rows"
        with nullcontext() if self._writing is None else self._writing.turn():
            for column, parts in enumerate(self._parts):
                pages = table[:, column]
                for part in parts:
                    end = at + num_rows * part.shape[1]
                    self._write(part, pages, data[at:end].reshape(num_rows, -1)[first:])
                    at = end

    def _read(self, part: Bytes | torch.Tensor, pages: Ids, out: Bytes) -> None:
        if self._reading is not None:
            self._reading.read(part, pages, out)
            return
        for begin, end in _runs(pages):
            page = int(pages[begin])
            out[begin:end] = part[page : page + end - begin]

    def _write(self, part: Bytes | torch.Tensor, pages: Ids, data: Bytes) -> None:
        if self._writing is not None:
            self._writing.write(part, pages, data)
            return
        for begin, end in _runs(pages):
            page = int(pages[begin])
            if page:
                part[page : page + end - begin] = data[begin:end]


def _runs(pages: Ids) -> list[tuple[int, int]]:
    """[begin, end) of the stretches of pages that follow each other in memory; zeros are alone."""
    if not len(pages):
        return []
    breaks = np.flatnonzero((np.diff(pages) != 1) | (pages[:-1] == 0)) + 1
    bounds = [0, *breaks.tolist(), len(pages)]
    return list(pairwise(bounds))
