"""What is known of a child that is stopped and goes on at once."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any

import psutil
import pytest

from setpoint.launch.parent import process as module
from setpoint_testing.server_process import wait_until


def test_a_child_that_goes_on_is_never_believed_to_be_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Red before: the child went on between the two calls that tell of a change and take note of
    it, and was believed to be stopped for ever. Its server took no request any more."""
    real = os.waitid

    with subprocess.Popen(["sleep", "600"]) as child:
        status = psutil.Process(child.pid).status

        def waitid(kind: int, pid: int, options: int) -> Any:
            found = real(kind, pid, options)
            if options & os.WNOWAIT and found.si_code == os.CLD_STOPPED:
                child.send_signal(signal.SIGCONT)
                wait_until(lambda: status() != psutil.STATUS_STOPPED)
            return found

        monkeypatch.setattr(module.os, "waitid", waitid)
        try:
            child.send_signal(signal.SIGSTOP)
            assert module._next_change(child.pid) == os.CLD_CONTINUED
        finally:
            child.kill()
