"""Work at a low priority."""

from __future__ import annotations

import os
import threading
from contextvars import ContextVar

import pytest

from setpoint.launch.child.low_priority import NICE, at_low_priority


def priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_only_the_work_and_its_threads_have_a_low_priority() -> None:
    usual, name = priority(), ContextVar("name", default="")
    name.set("of the caller")
    found = []

    def work() -> str:
        thread = threading.Thread(target=lambda: found.append(priority()))
        thread.start()
        thread.join()
        found.append(priority())
        return name.get()

    assert at_low_priority(work) == "of the caller"
    assert found == [min(usual + NICE, 19)] * 2
    assert priority() == usual
    with pytest.raises(ZeroDivisionError):
        at_low_priority(lambda: 1 // 0)
