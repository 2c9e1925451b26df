"""The clock of the time in which a process runs, in a process that is really stopped."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time

import pytest

from setpoint.core.awake import CLOCK, LEAP_S, timeout_awake
from setpoint_testing.server_process import PATIENCE_S, wait_until

CHILD = """
import asyncio, time
from setpoint.core.awake import CLOCK, timeout_awake

async def main():
    began, awake = time.monotonic(), CLOCK.now()
    print("begun", flush=True)
    try:
        async with timeout_awake(6.0):
            await asyncio.sleep(600)
    except TimeoutError:
        print(time.monotonic() - began, CLOCK.now() - awake, flush=True)

asyncio.run(main())
"""


def test_a_pause_does_not_count() -> None:
    """It is stopped for longer than its limit, and then waits for what is left of it."""
    command = [sys.executable, "-c", CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == "begun\n"
            child.send_signal(signal.SIGSTOP)
            time.sleep(7)
            child.send_signal(signal.SIGCONT)
            elapsed, awake = map(float, child.stdout.readline().split())
        finally:
            child.kill()
    assert awake >= 6.0
    assert elapsed >= awake + 7 - LEAP_S


def test_it_runs_while_the_process_does() -> None:
    began = CLOCK.now()
    wait_until(lambda: CLOCK.now() - began > 1.0, timeout_s=PATIENCE_S)


@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_a_limit_is_a_timeout(seconds: float) -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with timeout_awake(seconds):
                await asyncio.sleep(PATIENCE_S)
        async with timeout_awake(PATIENCE_S):
            await asyncio.sleep(0)

    asyncio.run(main())
