"""How long work takes with several threads, also where other programs have the processor."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from setpoint.engine.kernels.cpu import peak_rates


@dataclass
class Machine:
    """Work of 4 ms of one thread. Clocks are as the process reads them."""

    wait_s: float
    """For so long a run with several threads waits for a core."""
    wall_s: float = 0.0
    thread_s: float = 0.0
    process_s: float = 0.0

    def run(self, threads: int) -> None:
        share = 0.004 / threads
        self.wall_s += share + self.wait_s
        self.thread_s += share
        self.process_s += share * threads


@pytest.mark.parametrize(("wait_s", "is_alone"), [(0.0, True), (0.0001, True), (0.08, False)])
def test_what_others_take_does_not_count(
    wait_s: float, is_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red before: threads that wait for each other took forty times as long."""
    machine = Machine(wait_s)
    clocks: dict[str, Any] = {
        "perf_counter": lambda: machine.wall_s,
        "thread_time": lambda: machine.thread_s,
        "process_time": lambda: machine.process_s,
    }
    monkeypatch.setattr(peak_rates, "time", SimpleNamespace(**clocks))
    seconds, alone = peak_rates.fastest(machine.run, 2)
    assert seconds == pytest.approx(0.002, rel=0.06)
    assert alone == is_alone
