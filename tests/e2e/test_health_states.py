"""What the probes answer in each state that a server can be in (docs/engines.md). No probe waits for
a request, so each has its answer while requests that came before it are still open."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from setpoint_testing.server_process import (
    PATIENCE_S,
    ServerProcess,
    engines_of,
    running_server,
    stop_next_engine,
    wait_until,
)

PROBES = ("/health", "/health_generate", "/ready", "/ping")
LONG = {"max_new_tokens": 3000, "ignore_eos": True}


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.full)])
def server(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    with running_server(
        tmp_path_factory.mktemp("server"),
        *("--model-path", str(tiny_model), "--dp-size", str(request.param), "--num-threads", "1"),
        *("--max-running-requests", "1", "--max-engine-restarts", "100"),
    ) as server:
        yield server


def ranks(server: ServerProcess) -> list[dict[str, Any]]:
    info = httpx.get(f"{server.url}/server_info", timeout=PATIENCE_S).json()
    return list(info["ranks"])


def answers(server: ServerProcess) -> set[tuple[int, str]]:
    """The different answers to all probes."""
    found = (httpx.get(server.url + path, timeout=PATIENCE_S) for path in PROBES)
    return {(each.status_code, each.text) for each in found}


def is_whole(server: ServerProcess) -> None:
    """Every engine takes requests."""
    wait_until(lambda: answers(server) == {(200, "")})


def post(server: ServerProcess, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=2 * PATIENCE_S)


def test_an_idle_server(server: ServerProcess) -> None:
    is_whole(server)


def test_a_saturated_server(server: ServerProcess) -> None:
    """One request runs on each engine, and the others wait."""
    is_whole(server)
    with ThreadPoolExecutor(12) as pool:
        running = [
            pool.submit(post, server, "/generate", text="a", sampling_params=LONG)
            for _ in range(12)
        ]
        wait_until(lambda: sum(each["num_requests"] for each in ranks(server)) == len(running))
        assert answers(server) == {(200, "")}
        assert not all(each.done() for each in running), "the probes waited for the requests"
        post(server, "/abort_request", abort_all=True)
        assert {each.result().status_code for each in running} == {200}


def test_a_busy_frontend(server: ServerProcess) -> None:
    """Many clients send texts that take long to tokenize."""
    is_whole(server)
    text = "many words " * 20_000
    with ThreadPoolExecutor(8) as pool:
        running: list[Future[httpx.Response]] = [
            pool.submit(post, server, "/tokenize", prompt=text) for _ in range(24)
        ]
        asked = 0
        while not asked or not all(each.done() for each in running):
            assert answers(server) == {(200, "")}
            asked += 1
        assert {each.result().status_code for each in running} == {200}


def say(server: ServerProcess, state: str, *, count: int) -> bool:
    """Whether all probes of a server with ``count`` engines say that one of them is in this state,
    and whether another can serve."""
    status = 503 if count == 1 else 200
    return any(answers(server) == {(status, f"engine {rank}: {state}\n")} for rank in range(count))


def test_an_engine_that_is_killed_and_started_again(server: ServerProcess) -> None:
    is_whole(server)
    before = {each.pid for each in engines_of(server.process.pid)}
    os.kill(min(before), signal.SIGKILL)
    late = stop_next_engine(server.process.pid, before)
    try:
        wait_until(lambda: say(server, "restarting", count=len(before)))
        assert "Engine 0 died: " in server.errors
        assert "is started again" in server.errors
    finally:
        os.kill(late, signal.SIGCONT)
    is_whole(server)
    assert "is ready again after" in server.errors


def test_an_engine_that_hangs(server: ServerProcess) -> None:
    is_whole(server)
    engines = engines_of(server.process.pid)
    engines[0].send_signal(signal.SIGSTOP)
    try:
        wait_until(lambda: say(server, "stopped", count=len(engines)))
        assert "has been stopped by a signal: its requests wait" in server.errors
    finally:
        engines[0].send_signal(signal.SIGCONT)
    is_whole(server)


def test_a_server_that_starts_and_drains(tiny_model: Path, tmp_path: Path) -> None:
    with (
        running_server(tmp_path, "--model-path", str(tiny_model), ready=False) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        engine = stop_next_engine(server.process.pid, set())
        try:
            wait_until(lambda: "Loading" in server.errors or "load" in server.errors)
            for path in PROBES:
                with pytest.raises(httpx.ConnectError):
                    httpx.get(server.url + path, timeout=PATIENCE_S)
        finally:
            os.kill(engine, signal.SIGCONT)
        server.wait_ready()
        is_whole(server)

        running = pool.submit(post, server, "/generate", text="a", sampling_params=LONG)
        wait_until(lambda: ranks(server)[0]["num_requests"] == 1)
        engine_process = engines_of(server.process.pid)[0]
        engine_process.send_signal(signal.SIGSTOP)  # so that the request stays open
        try:
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: answers(server) == {(503, "draining\n")})
            assert not running.done(), "the probes waited for the request"
            assert "Draining: 1 request runs" in server.errors
        finally:
            engine_process.send_signal(signal.SIGCONT)
        assert running.result().status_code == 200
        assert server.wait_end() == 0
