"""Orders to all engines while engines die: a restarted engine serves under the last order, and an end
of the server does not wait for one that is loading."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from setpoint_testing.server_process import (
    PATIENCE_S,
    ServerProcess,
    running_server,
    stop_next_engine,
    wait_until,
)

UPDATE = "/update_weights_from_disk"


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(
        tmp_path_factory.mktemp("server"),
        *("--model-path", str(tiny_model), "--dtype", "float32", "--num-threads", "1"),
        *("--dp-size", "2"),
    ) as server:
        yield server


def post(server: ServerProcess, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=PATIENCE_S)


def engines(server: ServerProcess) -> list[dict[str, Any]]:
    answer = httpx.get(f"{server.url}/fault_tolerance/status", timeout=PATIENCE_S)
    return list(answer.json()["engines"])


def kill(server: ServerProcess, rank: int) -> None:
    """Kill the engine of a rank, and wait until the server knows."""
    os.kill(engines(server)[rank]["pid"], signal.SIGKILL)
    wait_until(lambda: engines(server)[rank]["state"] != "ready")


def all_serve(server: ServerProcess) -> None:
    """Both engines answer, each by itself."""
    wait_until(lambda: all(each["state"] == "ready" for each in engines(server)))
    for rank in range(2):
        server.generate(text="a", sampling_params={"max_new_tokens": 2}, routed_dp_rank=rank)
    info = httpx.get(f"{server.url}/server_info", timeout=PATIENCE_S).json()
    assert [each["paused"] for each in info["internal_states"]] == [None, None]


def test_an_update_that_meets_a_restart_pauses_no_engine_for_ever(
    server: ServerProcess, tiny_model: Path
) -> None:
    """Red before: the engine came back paused, and nothing said so."""
    kill(server, 0)
    body = {"model_path": str(tiny_model), "abort_all_requests": True}
    assert post(server, UPDATE, **body).json()["success"]
    all_serve(server)


@pytest.mark.full
def test_an_engine_in_its_birth_gets_the_orders(server: ServerProcess, tiny_model: Path) -> None:
    all_serve(server)
    kill(server, 1)
    assert post(server, "/pause_generation", mode="retract").status_code == 200
    assert post(server, "/set_internal_state", server_args={"stream_interval": 3}).is_success
    wait_until(lambda: all(each["status"] == "paused" for each in engines(server)))
    kill(server, 0)
    assert post(server, UPDATE, model_path=str(tiny_model), weight_version="two").is_success
    assert post(server, "/continue_generation").status_code == 200
    all_serve(server)
    states = httpx.get(f"{server.url}/server_info", timeout=PATIENCE_S).json()["internal_states"]
    assert [each["settings"]["stream_interval"] for each in states] == [3, 3]


@pytest.mark.full
def test_a_drain_does_not_wait_for_an_engine_that_is_loading(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Red before: it waited until the drain time was over, and was then cut off with code 1 on a
    busy machine."""
    with running_server(
        tmp_path, "--model-path", str(tiny_model), "--drain-timeout", "600"
    ) as server:
        before = engines(server)[0]["pid"]
        os.kill(before, signal.SIGKILL)
        stop_next_engine(server.process.pid, {before})
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_end() == 0


@pytest.mark.cases(1)
@pytest.mark.parametrize("busy", [0, 1])
def test_an_order_that_one_engine_refuses_changes_none(
    server: ServerProcess, tiny_model: Path, busy: int
) -> None:
    """Red before: the idle engine loaded the weights and was then ended, because engines must
    agree."""
    all_serve(server)
    before = [each["pid"] for each in engines(server)]
    sampling = {"max_new_tokens": 3000, "ignore_eos": True}
    body = {"text": "a", "sampling_params": sampling, "stream": True, "routed_dp_rank": busy}
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=PATIENCE_S) as response:
        lines = response.iter_lines()
        next(lines)
        update = post(server, UPDATE, model_path=str(tiny_model))
        release = post(server, "/release_memory_occupation")
        flush = post(server, "/flush_cache")
        assert [each.status_code for each in (update, release, flush)] == [400, 400, 400]
        assert "not idle" in update.text
        assert "not idle" in release.text
        # The idle engine takes requests again.
        server.generate(text="a", sampling_params={"max_new_tokens": 1}, routed_dp_rank=1 - busy)
        assert next(lines) is not None
    all_serve(server)
    assert [each["pid"] for each in engines(server)] == before
    assert "Cache flushed" not in server.errors
    wait_until(lambda: post(server, UPDATE, model_path=str(tiny_model)).is_success)
    all_serve(server)
