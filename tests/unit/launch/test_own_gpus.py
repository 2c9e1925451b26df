"""The environments of processes that use some of the visible GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from setpoint.config.options import Options
from setpoint.launch import ranks
from setpoint.launch.own_gpus import with_gpus
from setpoint.launch.parent import engine
from setpoint.launch.parent.engine import _spawning


@pytest.mark.parametrize(
    ("visible", "gpus", "expected"),
    [
        (None, [0], "0"),
        (None, [4, 6], "4,6"),
        ("2,5,7", [1], "5"),
        ("2, 5,7", [1, 2], "5,7"),
        ("GPU-aa,MIG-bb", [1], "MIG-bb"),
        ("2,5", [1, 2], "5"),
        ("2", [1], ""),
        ("", [0], ""),
        ("-1", [0], "-1"),
    ],
)
def test_no_gpu_becomes_visible_that_was_not(
    visible: str | None, gpus: list[int], expected: str
) -> None:
    environ = {"A": "b"} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert with_gpus(environ, gpus) == {"A": "b", "CUDA_VISIBLE_DEVICES": expected}


@pytest.mark.parametrize(
    ("asked", "of_engines", "of_ranks"),
    [
        ({}, [None], []),
        ({"tp_size": 3}, [None], ["1", "2"]),
        ({"dp_size": 2}, [(0,), (1,)], []),
        ({"tp_size": 2, "base_gpu_id": 4}, [(4, 5)], ["5"]),
        ({"tp_size": 2, "dp_size": 2, "gpu_id_step": 2}, [(0, 2), (4, 6)], ["2"]),
    ],
)
def test_engines_and_their_ranks_see_their_gpus(
    asked: dict[str, int],
    of_engines: list[tuple[int, ...] | None],
    of_ranks: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """of_ranks: what the ranks of the first engine but its first see."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    started: list[Any] = []
    monkeypatch.setattr(engine, "spawn_child", lambda gpus, **more: started.append((gpus, more)))
    options = Options.of(**asked)
    with _spawning(options, None) as spawn:
        for number in range(options.parallel.dp_size):
            spawn(number)
    assert [gpus for gpus, _ in started] == of_engines
    gpus, more = started[0]
    if gpus is not None:
        monkeypatch.setattr(os, "environ", with_gpus(os.environ, gpus))
    seen: list[str] = []

    class Process:
        def __init__(self, command: list[str], *, env: dict[str, str], **more: Any) -> None:
            assert command[0] == sys.executable
            seen.append(env["CUDA_VISIBLE_DEVICES"])

    monkeypatch.setattr(subprocess, "Popen", Process)
    others = range(1, more["num_ranks"])
    ranks.start_ranks(others, others)
    assert seen == of_ranks
