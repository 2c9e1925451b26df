"""Finds memory for tokens to come while the machine has nothing else to do, so that no request waits for it.

A pool on a CPU is only mapped at the start, and the first write to each place has to wait until the system has found a page: 2 % of a
prefill, and a tenth where a hypervisor has to find it too (docs/notebook.md). All of it at once would take seconds, and gigabytes that may
never be used. Works on page numbers, which are handed out in ascending order; knows nothing of requests.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref

from setpoint.engine.runner.model_runner import ModelRunner

AHEAD_BYTES = 1 << 30
"""Of K and V beyond the highest page that was ever seen in use."""
STEP_TOKENS = 1024
INTERVAL_S = 0.2
"""Between looks, once there is enough."""


def populate_ahead(runner: ModelRunner) -> None:
    """In a thread of its own, until the pool is full or gone. Nothing happens where memory cannot be populated."""
    if runner.pool.populate(0, 1):
        threading.Thread(target=_run, args=(weakref.ref(runner),), name="populate", daemon=True).start()


def _run(reference: weakref.ref[ModelRunner]) -> None:
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
    done = highest = 0
    while (runner := reference()) is not None:
        pool, page_size = runner.pool, runner.page_size
        num_pages = pool.num_tokens // page_size + 1
        highest = max(highest, int(runner.slots.pages.tensor.numpy().max()))
        wanted = min(num_pages, highest + AHEAD_BYTES * num_pages // pool.num_bytes)
        if done < wanted:
            end = min(done + max(1, STEP_TOKENS // page_size), wanted)
            if not pool.populate(done, end):  # there is no memory left to be had
                return
            done = end
        if done == num_pages:
            return
        del runner, pool
        if done >= wanted:
            time.sleep(INTERVAL_S)
