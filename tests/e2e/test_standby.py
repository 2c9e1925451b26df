"""``--engine-standby``: an engine that dies is followed by one that is loaded already."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from setpoint.testing.server_process import (
    PATIENCE_S,
    ServerProcess,
    engines_of,
    running_server,
    wait_until,
)

BODY: dict[str, Any] = {
    "text": "abcdef",
    "sampling_params": {
        "max_new_tokens": 400,
        "ignore_eos": True,
        "temperature": 1,
        "sampling_seed": 7,
    },
}
TAKEN = "The standby takes the place of engine 0"


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(
        tmp_path_factory.mktemp("server"),
        *("--model-path", str(tiny_model), "--dtype", "float32", "--num-threads", "1"),
        *("--engine-standby", "--enable-metrics", "--max-engine-restarts", "100"),
    ) as server:
        yield server


def info(server: ServerProcess) -> Any:
    return httpx.get(f"{server.url}/server_info", timeout=PATIENCE_S).json()


def has_standby(server: ServerProcess) -> bool:
    ready = httpx.get(f"{server.url}/ready", timeout=PATIENCE_S).status_code == 200
    return ready and info(server)["standby"] == "ready"


def pair(server: ServerProcess) -> tuple[psutil.Process, psutil.Process]:
    """The engine that serves, and the standby, which was started after it."""
    wait_until(lambda: has_standby(server))
    first, second = sorted(engines_of(server.process.pid), key=lambda each: each.create_time())
    return first, second


def answers(server: ServerProcess, disturb: Any) -> list[str]:
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(server.generate, **BODY) for _ in range(8)]
        disturb()
        return [each.result(PATIENCE_S)["text"] for each in asked]


def is_computing(server: ServerProcess) -> bool:
    return server.state()["num_running_tokens"] > 200


def test_it_takes_the_place_of_an_engine_that_is_killed(server: ServerProcess) -> None:
    engine, standby = pair(server)
    undisturbed = answers(server, lambda: None)
    restarts = server.errors.count("is started again")

    def disturb() -> None:
        wait_until(lambda: is_computing(server))
        engine.kill()

    assert answers(server, disturb) == undisturbed
    assert TAKEN in server.errors
    assert server.errors.count("is started again") == restarts
    serving, following = pair(server)
    assert (serving.pid, following.pid != engine.pid) == (standby.pid, True)
    page = httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text
    (sample,) = (line for line in page.splitlines() if line.startswith("setpoint:standby_ready"))
    assert float(sample.split()[-1]) == 1
    sizes = {each["memory_usage"]["token_capacity"] for each in info(server)["internal_states"]}
    assert sizes == {info(server)["max_total_num_tokens"]}


def test_a_standby_that_dies_is_replaced(server: ServerProcess) -> None:
    engine, standby = pair(server)

    def disturb() -> None:
        wait_until(lambda: is_computing(server))
        standby.kill()

    answers(server, disturb)
    wait_until(lambda: "The standby engine has ended: " in server.errors)
    serving, following = pair(server)
    assert serving.pid == engine.pid
    assert following.pid != standby.pid


def test_both_may_die_at_once(server: ServerProcess) -> None:
    engine, standby = pair(server)
    undisturbed = answers(server, lambda: None)

    def disturb() -> None:
        wait_until(lambda: is_computing(server))
        standby.kill()
        engine.kill()

    assert answers(server, disturb) == undisturbed
    serving, following = pair(server)
    assert not {serving.pid, following.pid} & {engine.pid, standby.pid}


def test_it_has_the_options_of_now(server: ServerProcess) -> None:
    engine, standby = pair(server)
    changed = httpx.post(
        f"{server.url}/set_internal_state",
        json={"server_args": {"max_running_requests": 3}},
        timeout=PATIENCE_S,
    )
    assert changed.status_code == 200, changed.text
    wait_until(lambda: "The standby engine is replaced" in server.errors)
    engine, other = pair(server)
    assert other.pid != standby.pid
    taken = server.errors.count(TAKEN)
    engine.kill()
    wait_until(lambda: server.errors.count(TAKEN) > taken)
    pair(server)
    assert server.state()["settings"]["max_running_requests"] == 3


def test_the_end_leaves_no_process(tiny_model: Path, tmp_path: Path) -> None:
    with running_server(tmp_path, "--model-path", str(tiny_model), "--engine-standby") as server:
        both = pair(server)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_end() == 0
        wait_until(lambda: not any(each.is_running() for each in both))
        assert "The engine died" not in server.errors


def test_it_is_refused_beside_several_engines(tiny_model: Path, tmp_path: Path) -> None:
    with running_server(
        tmp_path,
        *("--model-path", str(tiny_model), "--dp-size", "2", "--engine-standby"),
        ready=False,
    ) as server:
        assert server.wait_end() == 2
        assert "--engine-standby is for a server with one engine" in server.messages[-1]
