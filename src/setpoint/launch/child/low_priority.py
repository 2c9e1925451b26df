"""Runs work with a low CPU priority, so that it takes little from a process that serves."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

T = TypeVar("T")

NICE = 10
"""The increase of the nice value. Next to a thread of normal priority, such a thread gets about a
tenth of a core."""


def at_low_priority(work: Callable[[], T]) -> T:
    """The result of ``work``, which runs in a thread of low priority. The threads that it starts
    have the same priority.

    On Linux each thread has its own priority, and only a privileged process may raise a priority
    again. The separate thread ends with the work, and the other threads keep their normal priority.
    """

    def lower() -> None:
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICE)

    with ThreadPoolExecutor(1, "low-priority", initializer=lower) as pool:
        return pool.submit(copy_context().run, work).result()
