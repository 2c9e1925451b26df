"""What engines that compute in step share, and how they end together."""

from __future__ import annotations

import os
import select
import socket
import threading
from typing import Any

import pytest

from setpoint.ipc.sockets import EngineSocket
from setpoint.launch.lockstep_memory import bell_of, mapped, ring
from setpoint.launch.parent import lockstep
from setpoint.launch.parent.lockstep import SteppingEngines


def test_engines_share_memory_until_all_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[int]] = []

    def spawn(gpus: None, *, inherits: list[int], **more: Any) -> Any:
        given.append([os.dup(each) for each in inherits])

    monkeypatch.setattr(lockstep, "spawn_child", spawn)
    with SteppingEngines(2, stderr=None) as start:
        for rank in (0, 1, 1, 0):
            start(rank)
    lives = [mapped(each) for each in given]
    lives[0][0] = 7
    assert [memory[0] for memory in lives] == [7, 7, 0, 0]
    lives[2][0] = 8
    assert lives[3][0] == 8
    for descriptors in given:
        for each in descriptors:
            os.close(each)


def test_a_bell_wakes_the_loop_of_another_engine() -> None:
    bells = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2)]
    inherited = [-1, *bells]
    ours, theirs = socket.socketpair()
    link = EngineSocket(theirs.detach(), bell_of(inherited, 1))
    timer = threading.Timer(0.05, lambda: ring(inherited, 0))
    timer.start()
    assert link.receive(3600.0) == []  # without the bell, the test's own limit ends the wait
    ready, _, _ = select.select(bells, [], [], 0)
    assert not ready, "one wakes up once, and nobody wakes oneself"
    link.close()
    ours.close()
    for bell in bells:
        os.close(bell)
