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
"""How much is added to the priority's number: such a thread gets about a tenth of a core that a
normal one wants, too."""


def at_low_priority(work: Callable[[], T]) -> T:
    """The result of ``work``, done in a thread of low priority; the threads that it starts have the
    same.

    A thread of its own, because on Linux each thread has its own priority, and only a privileged
    process may raise one again: this one ends with the work, and the others never had less.
    """

    def lower() -> None:
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICE)

    with ThreadPoolExecutor(1, "low-priority", initializer=lower) as pool:
        return pool.submit(copy_context().run, work).result()
