"""A server that was told to end gives open requests some seconds; told again, it does not wait."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import httpx
import pytest

from setpoint.testing.server import running_server, wait_until


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_shortens_the_end(tiny_model: Path, tmp_path: Path, number: signal.Signals) -> None:
    """Red before: the second one changed nothing, though the log offered it."""
    with running_server(tmp_path, "--model-path", str(tiny_model), "--dtype", "float32") as server:
        body = {"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}}
        with httpx.Client(timeout=30) as client, client.stream("POST", f"{server.url}/generate", json=body) as response:
            next(response.iter_bytes())
            server.process.send_signal(number)
            wait_until(lambda: "Shutting down" in server.errors)
            started = time.monotonic()
            server.process.send_signal(number)
            assert server.wait_end(timeout_s=10) == 0
        assert time.monotonic() - started < 4
        assert "A second signal" in server.errors
        assert "Traceback" not in server.errors
