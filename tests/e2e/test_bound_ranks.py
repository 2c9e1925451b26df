"""Ranks run on the cores that they are given, with every thread that computes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from setpoint_testing.server_process import ServerProcess, running_server

VARIABLE = "SGLANG_CPU_OMP_THREADS_BIND"
EIGHT = {"max_new_tokens": 8, "ignore_eos": True}


def allowed_of_threads(pid: int) -> set[str]:
    """The CPUs that each thread of a process may use, each set once."""
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        for line in (task / "status").read_text().splitlines():
            name, _, value = line.partition(":\t")
            if name == "Cpus_allowed_list":
                found.add(value)
    return found


def bound(server: ServerProcess) -> list[set[str]]:
    """``allowed_of_threads`` of every rank of an engine, beginning with the first."""
    assert server.engine is not None
    others = [
        child
        for child in server.engine.children()
        if "setpoint.launch.child.rank" in child.cmdline()
    ]
    others.sort(key=lambda child: int(child.cmdline()[-2]))
    return [allowed_of_threads(each.pid) for each in (server.engine, *others)]


@pytest.mark.full
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_each_rank_of_each_engine_runs_on_its_list(tiny_model: Path, tmp_path: Path) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    arguments = ("--model-path", str(tiny_model), "--tp-size", "2")
    with running_server(tmp_path, *arguments, env={VARIABLE: f"{second}|{first}"}) as server:
        server.generate(text="Once", sampling_params=EIGHT)
        assert bound(server) == [{str(second)}, {str(first)}]
        (line,) = [each for each in server.messages if "Bound to cores" in each]
        assert f"TP0 on CPU {second}" in line
        assert f"TP1 on CPU {first}" in line
        assert VARIABLE in line
        # The frontend is not bound.
        assert allowed_of_threads(server.process.pid) != {str(second)}


def test_one_engine_on_one_core(tiny_model: Path, tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    with running_server(
        tmp_path, "--model-path", str(tiny_model), env={VARIABLE: str(core)}
    ) as server:
        server.generate(text="Once", sampling_params=EIGHT)
        assert bound(server) == [{str(core)}]
        assert "num_threads=1" in server.errors


def test_a_core_that_is_not_there_is_refused_in_one_line(tiny_model: Path, tmp_path: Path) -> None:
    with running_server(
        tmp_path, "--model-path", str(tiny_model), ready=False, env={VARIABLE: "0-999"}
    ) as server:
        assert server.wait_end() == 2
        (message,) = [each for each in server.messages if "error" in each]
        assert f"environment variable {VARIABLE} names CPU" in message
        assert "possible: " in message
