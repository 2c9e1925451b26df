"""How a process ends that is asked to while it starts."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

STARTS = """
import time
from setpoint.launch.deadline import end_at_signals
end_at_signals(7)
{}
"""
WORK = {
    "a sleep": "print('begun', flush=True); time.sleep(60)",
    # In these, KeyboardInterrupt would end the interpreter by the signal, or go nowhere.
    "exec": "exec(\"print('begun', flush=True); time.sleep(60)\")",
    "a destructor": """
class Slow:
    def __del__(self):
        print("begun", flush=True)
        time.sleep(60)
Slow()
time.sleep(60)
""",
}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("work", WORK)
def test_a_signal_ends_it_with_its_exit_code(work: str, number: signal.Signals) -> None:
    command = [sys.executable, "-c", STARTS.format(WORK[work])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(number)
        process.send_signal(number)  # whoever is impatient gets the same end
        assert process.wait() == 7
