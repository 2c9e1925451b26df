"""A pause of the machine, or of a process, for longer than the watchdog waits: nothing ends."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from setpoint_testing.server_process import PATIENCE_S, ServerProcess, running_server, wait_until

WATCHDOG_S = 5


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(
        tmp_path_factory.mktemp("server"),
        *("--model-path", str(tiny_model), "--dtype", "float32"),
        *("--watchdog-timeout", str(WATCHDOG_S)),
    ) as server:
        yield server


@pytest.mark.parametrize(
    "paused",
    [
        pytest.param("engine", marks=pytest.mark.full),
        pytest.param("parent", marks=pytest.mark.full),
        "both",
    ],
)
def test_a_pause_ends_nothing(server: ServerProcess, paused: str) -> None:
    """Red before: the engine ended itself as soon as it went on."""
    assert server.engine is not None
    processes = {
        "engine": [server.engine],
        "parent": [psutil.Process(server.process.pid)],
        "both": [psutil.Process(server.process.pid), server.engine],
    }[paused]
    sampling = {"max_new_tokens": 1500, "ignore_eos": True, "temperature": 0}

    def ask() -> int:
        body = {"text": "a", "sampling_params": sampling}
        response = httpx.post(f"{server.url}/generate", json=body, timeout=10 * PATIENCE_S)
        return int(response.json()["meta_info"]["completion_tokens"])

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        wait_until(lambda: server.state()["num_running"] == 1)
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        time.sleep(WATCHDOG_S + 2)
        for process in processes:
            process.send_signal(signal.SIGCONT)
        assert asked.result() == 1500
    assert server.generate(text="b", sampling_params={"max_new_tokens": 2})
    assert server.process.poll() is None
