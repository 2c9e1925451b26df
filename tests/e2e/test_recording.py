"""A server that is recorded, and its recording run again by the command."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from setpoint import Engine
from setpoint_testing.server_process import (
    PATIENCE_S,
    ServerProcess,
    engine_of,
    running_server,
    wait_until,
)

SAID = re.compile(r"(\d+) steps, (\d+) requests, 0 differing plans")


def replay(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "setpoint.cli", "replay", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def traffic(server: ServerProcess) -> None:
    """A few requests at a time, one that its client leaves, a refused one, and calls."""

    def ask(number: int) -> None:
        sampling = {"max_new_tokens": 5 + 10 * (number % 4), "temperature": 0.0}
        httpx.post(
            f"{server.url}/generate",
            json={"text": f"a prompt that many share, and {number}", "sampling_params": sampling},
            timeout=PATIENCE_S,
        ).raise_for_status()

    with ThreadPoolExecutor(8) as pool:
        assert len(list(pool.map(ask, range(40)))) == 40
    sampling = {"max_new_tokens": 500, "ignore_eos": True}
    left = {"text": "left", "stream": True, "sampling_params": sampling}
    with httpx.stream("POST", f"{server.url}/generate", json=left, timeout=PATIENCE_S) as response:
        next(response.iter_lines())
    httpx.post(f"{server.url}/generate", json={"input_ids": [999_999]}, timeout=PATIENCE_S)
    httpx.post(f"{server.url}/flush_cache", timeout=PATIENCE_S)


@pytest.mark.parametrize("content", [pytest.param("off", marks=pytest.mark.full), "on"])
def test_a_server_is_recorded_and_replayed(content: str, tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.rec"
    arguments = (
        "--model-path",
        str(tiny_model),
        "--record",
        str(path),
        "--record-content",
        content,
    )
    limits = ("--max-total-tokens", "600", "--chunked-prefill-size", "32")
    with running_server(tmp_path, *arguments, *limits) as server:
        traffic(server)
        (state,) = httpx.get(f"{server.url}/server_info", timeout=PATIENCE_S).json()[
            "internal_states"
        ]
        assert state["recording"]["num_bytes"] > 0
        assert state["recording"]["ended"] is None
    done = replay(path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = SAID.search(done.stdout)
    assert found is not None, done.stdout
    assert int(found[2]) >= 41
    printed = replay(path, "--print")
    assert printed.returncode == 0
    stamped = re.compile(r"(?m)^\[[0-9: -]{19}\S* TP0\] (Prefill batch, .*)$")
    lines = stamped.findall(server.errors)
    assert len(lines) > 5
    assert stamped.findall(printed.stdout)[1:] == lines[1:], "the first counts from the start"
    assert (b"many share" in path.read_bytes()) is False, "the file is compressed ids or hashes"


@pytest.mark.full
def test_a_killed_engine_leaves_a_recording_that_replays(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.rec"
    arguments = ("--model-path", str(tiny_model), "--record", str(path))
    with running_server(tmp_path, *arguments) as server:
        for _ in range(3):
            server.generate(text="some", sampling_params={"max_new_tokens": 200})
        engine_of(server.process.pid).send_signal(signal.SIGKILL)
        wait_until(lambda: "is started again" in server.errors)
        server.generate(text="some", sampling_params={"max_new_tokens": 20})
    for recording in (path, path.with_name("run.rec-2")):
        done = replay(recording)
        assert done.returncode == 0, done.stdout + done.stderr
        assert SAID.search(done.stdout)


def test_a_recording_is_not_overwritten(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.rec"
    path.write_text("precious")
    done = subprocess.run(
        [sys.executable, "-m", "setpoint.cli", "serve", str(tiny_model), "--record", str(path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 1
    assert "setpoint: error: There already is a recording" in done.stderr
    assert path.read_text() == "precious"
    assert "is not a recording of Setpoint" in replay(path).stderr


@pytest.mark.full
def test_an_offline_engine_is_recorded(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.rec"
    with Engine(str(tiny_model), record=str(path)) as engine:
        engine.generate("some words", {"max_new_tokens": 9})
    done = replay(path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = SAID.search(done.stdout)
    assert found is not None
    assert found[2] == "1"
