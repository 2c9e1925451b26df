"""Starts of engines in the place of others."""

from __future__ import annotations

import socket
import subprocess
import sys
from dataclasses import replace

from setpoint.launch.parent.process import ChildProcess
from setpoint_testing.simulation.world import Setting, World, options_of


def test_an_engine_that_is_killed_before_it_has_its_job_is_not_the_servers_end() -> None:
    """Its watcher sees that it has ended. Red before: StartupError ended the session of all engines,
    and a server that was draining had the exit code 1."""
    world = World("any", Setting(options_of({})))
    world.loop.close()
    launched = world._launched
    ours, theirs = socket.socketpair()
    popen = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE)
    popen.wait()
    process = ChildProcess(popen, ours)
    launched = replace(launched, spawn=lambda gpu: process)
    with theirs:
        assert launched.start_another(0, launched.served.job()) is process
    process.end()
