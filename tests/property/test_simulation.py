"""The control plane of a server, simulated with faults: every client gets what it would get alone, and
nothing is left behind (docs/simulation.md)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import setpoint
from setpoint_testing.simulation.engine import StepFault
from setpoint_testing.simulation.run import alone, fixed_plan, judged, simulate

BLOCK = 50
"""Seeds in one test."""
FOUND = {
    1: "A request that an engine had when it ended was refused by the full queue of the next one.",
    3: "The reader of a request that was aborted while it waited for an engine never woke.",
    11: "An engine that was stopped by a signal when a pause ended stayed paused.",
    18: "An engine that was starting while settings changed worked under the old ones.",
    43: "The watcher of a standby was left when the server ended.",
    51: "An engine that was starting while others loaded weights served with the old ones.",
    194: "Outputs that an engine sent twice were in the answer twice.",
    273: "A change that one engine refused was in force for the others.",
    5443: "The server ended although an operator wanted a rank again.",
    6426: "A request was blamed for the end of an engine that had missed other weights.",
    690: "A rank that an operator wanted again got an engine while the server was ending.",
}
"""Seeds that have found a fault, with the fault."""


def check(seeds: range) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        report = simulate(seed)
        again = f"python -m setpoint_testing.simulation --seed {seed} -v"
        assert not report.wrong, (again, report.wrong)
        seen.update(report.seen)
    return seen


@pytest.mark.cases(1)
@pytest.mark.parametrize("block", range(6))
def test_every_client_gets_what_it_would_get_alone(block: int) -> None:
    seen = check(range(block * BLOCK, (block + 1) * BLOCK))
    assert len(seen) >= 30, "the runs must exercise what they claim to"


@pytest.mark.full
@pytest.mark.parametrize("block", range(6, 200))
def test_many_more_seeds(block: int) -> None:
    check(range(block * BLOCK, (block + 1) * BLOCK))


@pytest.mark.parametrize("seed", FOUND)
def test_what_was_found_once(seed: int) -> None:
    check(range(seed, seed + 1))


@pytest.mark.cases(2)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("fault", ["kill before", "kill after", "crash before", "crash after"])
def test_death_at_every_step(ranks: int, fault: StepFault) -> None:
    plan = fixed_plan(ranks)
    expected = alone(plan)
    number, was_reached = 0, True
    while was_reached:
        number += 1
        report = judged(replace(plan, step_fault=(number, fault)), expected)
        assert not report.wrong, (number, report.wrong)
        assert report.seen["whole"] == len(plan.orders)
        first = report.world.engines[0]
        was_reached = first.num_steps >= number
    assert number > 20


def test_a_seed_gives_one_trace() -> None:
    traces = set()
    for hash_seed in ("1", "2"):
        command = [sys.executable, "-m", "setpoint_testing.simulation", "--count", "6", "-v"]
        done = subprocess.run(
            command,
            capture_output=True,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
        )
        traces.add(done.stdout)
    assert len(traces) == 1
    assert len(traces.pop()) > 10_000


def test_a_step_of_the_wall_clock_changes_nothing() -> None:
    """The rooms that supervise and schedule do not read it."""
    root = Path(setpoint.__file__).parent
    files = [*(root / "ipc").glob("*.py"), *(root / "scheduler").rglob("*.py")]
    files += [
        root / "launch/parent" / f"{name}.py" for name in ("engine_session", "process", "watchdog")
    ]
    for path in files:
        assert not re.search(r"time\.time\b|datetime", path.read_text()), path
