"""A rank and all of its threads run where its job says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from setpoint.config.hardware import Hardware
from setpoint.config.options import Options
from setpoint.config.placement import RankPlacement
from setpoint.config.resolve import resolve
from setpoint.launch.child import binding
from setpoint.launch.job import EngineJob
from setpoint.planning.memory import GIB
from setpoint_testing.specs import tiny_spec

MACHINE = Hardware(device="cpu", num_cores=4, available_bytes=20 * GIB)

BOUND = """
import json, logging, os, sys
from pathlib import Path
from setpoint.config.placement import RankPlacement
from setpoint.launch.child.binding import bind
import torch

logging.basicConfig(level=logging.DEBUG)
bind(RankPlacement(tuple(json.loads(sys.argv[1])), 2, json.loads(sys.argv[2])))
torch.set_num_threads(2)
torch.ones(512, 512) @ torch.ones(512, 512)
threads = [
    dict(line.split(":\\t", 1) for line in (task / "status").read_text().splitlines() if ":\\t" in line)
    for task in Path("/proc/self/task").iterdir()
]
memory = torch.ones(1 << 20)
policies = {
    line.split()[1]
    for line in Path("/proc/self/numa_maps").read_text().splitlines()
    if int(line.split()[0], 16) <= memory.data_ptr()
}
print(json.dumps([[each["Cpus_allowed_list"] for each in threads], sorted(policies)]))
"""


def bound(cpus: list[int], node: int | None) -> tuple[list[str], list[str], str]:
    """CPUs of each thread, the policies of the memory, and the log of a process that binds
    itself."""
    ran = subprocess.run(
        [sys.executable, "-c", BOUND, json.dumps(cpus), json.dumps(node)],
        check=True,
        capture_output=True,
        text=True,
    )
    threads, policies = json.loads(ran.stdout)
    return threads, policies, ran.stderr


@pytest.mark.parametrize("cpu", sorted(os.sched_getaffinity(0))[:2])
def test_every_thread_is_bound_those_of_openmp_too(cpu: int) -> None:
    threads, _, log = bound([cpu], None)
    assert len(threads) >= 2
    assert set(threads) == {str(cpu)}
    assert log == ""


def test_memory_is_preferred_on_the_node() -> None:
    _, policies, log = bound([min(os.sched_getaffinity(0))], 0)
    assert policies == ["prefer:0"] or "Memory is not bound to NUMA node 0" in log


@pytest.mark.parametrize(
    ("cpus", "node", "message"),
    [
        ([1023], None, "Not bound to CPU 1023: Invalid argument."),
        ([0], 1000, "Memory is not bound to NUMA node 1000: "),
    ],
)
def test_what_cannot_be_bound_is_logged(cpus: list[int], node: int | None, message: str) -> None:
    _, _, log = bound(cpus, node)
    assert message in log


@pytest.mark.parametrize(("engine", "rank"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_each_rank_of_each_engine_has_its_own_place(
    monkeypatch: pytest.MonkeyPatch, engine: int, rank: int
) -> None:
    places = tuple(RankPlacement((10 * i,), i + 1, None) for i in range(4))
    options = Options.of(dp_size=2, tp_size=2)
    config = replace(resolve(options, MACHINE, tiny_spec(num_kv_heads=2)), places=places)
    job = EngineJob(config, tiny_spec(), "/model", None, engine, None, False)
    asked: list[RankPlacement] = []
    monkeypatch.setattr(binding, "bind", asked.append)
    threads = binding.bound(job, rank).config.num_threads
    assert (asked, threads) == ([places[2 * engine + rank]], 2 * engine + rank + 1)


def test_a_job_without_places_binds_nothing() -> None:
    before = os.sched_getaffinity(0)
    job = EngineJob(
        resolve(Options(), MACHINE, tiny_spec()), tiny_spec(), "/model", None, None, None, False
    )
    assert binding.bound(job, 0) is job
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("name", "value", "warns"),
    [
        ("OMP_PROC_BIND", "true", True),
        ("OMP_PROC_BIND", "FALSE", False),
        ("GOMP_CPU_AFFINITY", "0-3", True),
    ],
)
def test_variables_that_undo_it_are_named(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    value: str,
    warns: bool,
) -> None:
    monkeypatch.setattr(binding, "bind", lambda place: None)
    monkeypatch.setenv(name, value)
    config = replace(
        resolve(Options(), MACHINE, tiny_spec()), places=(RankPlacement((0,), 1, None),)
    )
    binding.bound(EngineJob(config, tiny_spec(), "/model", None, None, None, False), 0)
    assert (f"{name} is set" in caplog.text) == warns
