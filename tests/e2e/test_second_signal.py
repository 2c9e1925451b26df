"""A server that was told to end gives open requests some seconds; told again, it does not wait."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from setpoint.launch.server import DRAIN_S
from setpoint.testing.server import running_server, wait_until


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_shortens_the_end(
    tiny_model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """Red before: the second one changed nothing, though the log offered it."""
    body = {"text": "a", "sampling_params": {"max_new_tokens": 4000, "n": 512, "ignore_eos": True}}
    with (
        running_server(tmp_path, "--model-path", str(tiny_model), "--dtype", "float32") as server,
        ThreadPoolExecutor(1) as pool,
    ):
        asked = pool.submit(lambda: httpx.post(f"{server.url}/generate", json=body, timeout=60))
        wait_until(lambda: server.state()["num_running"] > 0)
        server.process.send_signal(number)
        wait_until(lambda: "Shutting down" in server.errors)
        started = time.monotonic()
        server.process.send_signal(number)
        assert server.wait_end(timeout_s=30) == 0
        assert time.monotonic() - started < DRAIN_S - 1
        assert "A second signal" in server.errors
        assert "Traceback" not in server.errors
        with pytest.raises(httpx.HTTPError):
            asked.result()
