"""A real server's own doctor: a load that one limit stops is named in its answer, its log and its
metrics, and by ``setpoint doctor`` from outside."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from setpoint.testing.server_process import ServerProcess, running_server, wait_until


@contextmanager
def clients(server: ServerProcess, count: int) -> Iterator[None]:
    """So many clients, each of which sends its next request after the answer to the last one."""
    over = threading.Event()

    def work(number: int) -> None:
        body = {
            "text": f"Client {number} asks:",
            "sampling_params": {"max_new_tokens": 128, "ignore_eos": True},
        }
        with httpx.Client(timeout=60) as http:
            while not over.is_set():
                assert http.post(f"{server.url}/generate", json=body).status_code == 200

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def report(server: ServerProcess, query: str = "") -> Any:
    response = httpx.get(f"{server.url}/doctor{query}", timeout=30)
    assert response.status_code == 200, response.text
    return response.json()


def binding(server: ServerProcess) -> dict[str, float]:
    text = httpx.get(f"{server.url}/metrics", timeout=30).text
    return {
        sample.labels["limit"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "setpoint:binding_limit"
    }


@pytest.mark.full
def test_a_cap_of_two_is_named_everywhere(tmp_path: Path) -> None:
    options = ["--max-running-requests", "2", "--enable-metrics"]
    with running_server(tmp_path, *options) as server:
        assert report(server)["verdict"] == "not-enough-evidence"
        with clients(server, 16):
            wait_until(lambda: report(server)["verdict"] == "seq-cap", every_s=2.0)
            found = report(server, "?moments=true")
            action = found["findings"][0]["action"]
            assert (action["flag"], action["direction"]) == ("--max-running-requests", "increase")
            moment = found["moments"][-2]
            assert (moment["running_max"], moment["queue_max"]) == (2.0, 14.0)
            assert set(moment["refusals"]) <= {"no_slot", "blocked"}
            assert 0 < moment["quantiles"]["itl_p50"] < 10
            told = {name for each in found["moments"] for name in each.get("quantiles", ())}
            assert {"ttft_p50", "ttft_p95", "itl_p95", "wait_p50"} <= told
            wait_until(lambda: binding(server) == {"seq-cap": 1.0}, every_s=1.0)
            line = "Doctor: seq-cap limits the server. "
            wait_until(lambda: any(each.startswith(line) for each in server.messages))
            command = [sys.executable, "-m", "setpoint.cli", "doctor", server.url]
            done = subprocess.run(
                [*command, "--seconds", "25", "--json"], capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 1, done.stderr
            assert json.loads(done.stdout)["verdict"] == "seq-cap"
        lines = [each for each in server.messages if each.startswith("Doctor:")]
        assert len(lines) == 1
        assert server.engine is not None
        server.engine.suspend()
        found = report(server)
        assert found["verdict"] == "seq-cap"
        assert "did not answer" in found["sources"][0]["notes"][0]
        server.engine.resume()
