"""A pool as the mover of handovers sees it: rows of pages that it copies into buffers and out of
them (``core.handover.PageStore``), in a thread beside the loop."""

from __future__ import annotations

import numpy as np

from setpoint.core.request import Ids
from setpoint.engine.runner.kv_pool import KVPool
from setpoint.engine.runner.page_rows import PageRows


class PoolStore:
    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._memory = pool.memory
        self._rows = PageRows(pool)
        self.width = self._rows.width
        self.row_bytes = self._rows.row_bytes

    def read_into(self, rows: Ids, out: memoryview) -> None:
        self._present().read(rows, np.frombuffer(out, np.uint8))

    def write_from(self, rows: Ids, data: memoryview) -> None:
        self._present().write(rows, np.frombuffer(data, np.uint8))

    def _present(self) -> PageRows:
        """The rows of the pool's present memory. Raises RuntimeError while it is given back."""
        if self._pool.memory is not self._memory:
            if not self._pool.slabs:
                raise RuntimeError("the memory of the KV cache is given back")
            self._rows, self._memory = PageRows(self._pool), self._pool.memory
        return self._rows
