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

from setpoint_testing.server_process import ServerProcess, running_server, wait_until


@contextmanager
def clients(server: ServerProcess, count: int, *, max_new_tokens: int = 128) -> Iterator[None]:
    """So many clients, each of which sends its next request after the answer to the last one."""
    over = threading.Event()

    def work(number: int) -> None:
        body = {
            "text": f"Client {number} asks:",
            "sampling_params": {"max_new_tokens": max_new_tokens, "ignore_eos": True},
        }
        with httpx.Client(timeout=600) as http:
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


def check_the_log(server: ServerProcess, folder: Path, live: Any) -> None:
    """``setpoint doctor`` says of the log what the server says of itself: cause, option and value."""
    log = folder / "copy.log"
    log.write_text(server.errors)
    command = [sys.executable, "-m", "setpoint.cli", "doctor", str(log), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    read = json.loads(done.stdout)
    assert read["verdict"] == live["verdict"]
    one, other = (each["findings"][0]["action"] for each in (read, live))
    assert [one[key] for key in ("flag", "direction", "value")] == [
        other[key] for key in ("flag", "direction", "value")
    ]


@pytest.mark.full
def test_a_small_pool_is_named_everywhere(tmp_path: Path) -> None:
    """Four requests begin together, and at their ends they need nearly the whole pool, so that a smaller
    reserve would only bring retractions. Red before: kv-conservative, or nothing, by chance."""
    options = ["--max-total-tokens", "1100", "--enable-metrics", "--decode-log-interval", "8"]
    with running_server(tmp_path, *options) as server, clients(server, 16, max_new_tokens=256):
        wait_until(lambda: report(server)["verdict"] == "kv-full", every_s=2.0, timeout_s=150)
        wait_until(lambda: binding(server).get("kv-full") == 1.0, every_s=1.0, timeout_s=150)
        line = "Doctor: kv-full limits the server. "
        # Up to a minute after another line, of a time before the first wave had reached its end.
        wait_until(lambda: any(each.startswith(line) for each in server.messages), timeout_s=150)
        check_the_log(server, tmp_path, report(server))


@pytest.mark.full
def test_a_cap_of_two_is_named_everywhere(tmp_path: Path) -> None:
    options = ["--max-running-requests", "2", "--enable-metrics"]
    with running_server(tmp_path, *options) as server:
        assert report(server)["verdict"] == "not-enough-evidence"
        with clients(server, 16):
            wait_until(lambda: report(server)["verdict"] == "seq-cap", every_s=2.0)
            found: dict[str, Any] = {}

            def shows_the_whole_load() -> list[Any]:
                """The moments in which all clients had begun and tokens came."""
                found.update(report(server, "?moments=true"))
                told = {name for each in found["moments"] for name in each.get("quantiles", ())}
                whole = [
                    each
                    for each in found["moments"]
                    if "itl_p50" in each.get("quantiles", ()) and each["queue_max"] == 14.0
                ]
                return whole if {"ttft_p50", "ttft_p95", "itl_p95", "wait_p50"} <= told else []

            wait_until(shows_the_whole_load, every_s=2.0)
            action = found["findings"][0]["action"]
            assert (action["flag"], action["direction"]) == ("--max-running-requests", "increase")
            moment = shows_the_whole_load()[-1]
            assert moment["running_max"] == 2.0
            assert set(moment["refusals"]) <= {"no_slot", "blocked"}
            assert 0 < moment["quantiles"]["itl_p50"] < 10
            wait_until(lambda: binding(server) == {"seq-cap": 1.0}, every_s=1.0)
            line = "Doctor: seq-cap limits the server. "
            wait_until(lambda: any(each.startswith(line) for each in server.messages))
            command = [sys.executable, "-m", "setpoint.cli", "doctor", server.url]
            done = subprocess.run(
                [*command, "--seconds", "25", "--json"], capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 1, done.stderr
            assert json.loads(done.stdout)["verdict"] == "seq-cap"
            check_the_log(server, tmp_path, found)
        lines = [each for each in server.messages if each.startswith("Doctor:")]
        assert len(lines) == 1
        assert server.engine is not None
        server.engine.suspend()
        found = report(server)
        assert found["verdict"] == "seq-cap"
        assert "did not answer" in found["sources"][0]["notes"][0]
        server.engine.resume()
