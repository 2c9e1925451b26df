"""Claims memory for future tokens in the engine's idle moments, so that a later request does not
wait for it.

A pool on a CPU is only mapped at the start, and the first write to each memory page waits until the
system has found it: 2 % of a prefill, and 10 % where a hypervisor has to find the page too
(docs/notebook.md). Claiming all of it at once would take seconds of the start, and gigabytes that
may never be used. Under a load without pauses there is no idle moment, and tokens wait as they
would without this.

Works on page numbers, which are handed out in ascending order; knows nothing of requests.
"""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt

from setpoint.engine.kernels.device import claims_later
from setpoint.engine.kernels.host_memory import populate
from setpoint.engine.runner.kv_pool import KVPool

AHEAD_BYTES = 1 << 30
"""Bytes of K and V to claim beyond the pages in use."""
TURN_BYTES = 1 << 18
"""Bytes to claim at a time, or one page if that is larger: takes 0.1 ms, or 0.7 ms where a
hypervisor has to find the memory."""

logger = logging.getLogger(__name__)


class ClaimAhead:
    def __init__(self, pool: KVPool) -> None:
        self._stripes = [pages for slab in pool.slabs for pages in slab]
        pages = self._stripes[0]
        self._num_pages = len(pages)
        self._turn_pages = max(1, TURN_BYTES // pages[0].nbytes)
        self._ahead_pages = AHEAD_BYTES * self._num_pages // pool.num_bytes
        self._unused = 1
        """The first page that was never handed out: all pages above it are unused too. Written by
        ``hand_out``."""
        self._begin = self._end = 0
        """The range of pages whose memory is being claimed."""
        self._stripe = 0
        """The first stripe (a part of a slab) in which those pages are not claimed yet."""
        self._works = claims_later(pool.device)

    def hand_out(self, pages: npt.NDArray[np.int32]) -> None:
        """Record that these pages are in use from now on."""
        if len(pages):
            self._unused = max(self._unused, int(pages.max()) + 1)

    def advance(self) -> bool:
        """Claim memory for a few more of the pages that were never handed out.

        Returns False if nothing is left to do until more are handed out. If memory cannot be
        claimed ahead at all, the log says why, and the result is always False.
        """
        # The pages in use have overtaken the work, or all pages wanted so far are done.
        if self._begin < self._unused or self._begin == self._end:
            self._take(max(self._begin, self._unused))
        if not self._works or self._begin == self._end:
            return False
        try:
            populate(self._stripes[self._stripe][self._begin : self._end])
        except OSError as error:
            logger.info(
                "From now on the KV pool's memory is claimed when tokens are written, not ahead of"
                " them: %s",
                error,
            )
            self._works = False
        self._stripe += 1
        if self._stripe == len(self._stripes):
            self._take(self._end)
        return self._works

    def _take(self, begin: int) -> None:
        """Continue at page ``begin``, with at most as many pages as are wanted ahead."""
        self._begin = begin
        self._end = max(
            begin, min(begin + self._turn_pages, self._unused + self._ahead_pages, self._num_pages)
        )
        self._stripe = 0
